"""The Hopper implementation: which kernels run, in which order, on which arrays.

Files import those above them:

| file | what it knows |
|---|---|
| support.py | what the kernels of the gated delta rule can take |
| call.py | one call's sizes, where its sequences or their pieces lie, shapes of what kernels hand on |
| steps.py | its kernels in order, with their configurations |
| passes.py | the forward and the backward pass |
| over_devices.py | what is computed before, and beside, the exchange where sequences go on beyond a device |
| decoding.py | one or a few tokens from a state |
| rule.py | all of these as one module, by the contract of the implementations of the gated delta rule |
| conv1d.py | a layer's short convolution |
| norm.py | a layer's gated norm |

Each function makes one FFI call of all its kernels (`launch.launch`).
"""
