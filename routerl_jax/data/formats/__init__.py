"""The formats of published data sets of questions, one module each. `known.FORMATS` lists them all."""
