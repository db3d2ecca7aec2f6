"""The Hopper kernels: one TileLang program a file, with its formula, tile plan and plain-JAX specification.

`packaged.py` lists what a wheel carries. Importing a kernel's module needs neither TileLang nor a GPU.
"""
