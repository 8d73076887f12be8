"""Does a configuration fit, and what does a step cost: by the TPU compiler, without a TPU."""
