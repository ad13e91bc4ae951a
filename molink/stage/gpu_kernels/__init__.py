"""GPU kernels in Triton, which compiles them for the device when they first run.

Modules here import Triton only inside functions or in modules named ``*_kernels.py``, which are
imported late: see :mod:`molink.stage.gpu_kernels.triton_support`.
"""
