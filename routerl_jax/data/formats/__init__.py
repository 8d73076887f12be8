"""How published data sets write their questions: one file each; `known.FORMATS` has all."""
