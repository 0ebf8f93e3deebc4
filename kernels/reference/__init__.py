"""The definitions: each operator once, in plain torch, on any device.

Every other implementation is tested against these. A function marked with `declaration.define` declares an operator by
its name and signature. Forward functions also return what their backward needs (rstd, log-sum-exp);
`precision_kernels.autograd.operators` pairs them for autograd.
"""

from precision_kernels.reference.activation import *
from precision_kernels.reference.adamw import *
from precision_kernels.reference.attention import *
from precision_kernels.reference.digest import *
from precision_kernels.reference.exact import align, exp, lane_sum, log
from precision_kernels.reference.formats import BLOCK, FP8, FP8_MAX, SCALE_FLOOR, Quantised
from precision_kernels.reference.fused import *
from precision_kernels.reference.layout import AttentionLayout
from precision_kernels.reference.logprobs import *
from precision_kernels.reference.low_rank import *
from precision_kernels.reference.master import LowHalf, join_float32, split_float32
from precision_kernels.reference.matmul import *
from precision_kernels.reference.moments import Moment
from precision_kernels.reference.norm import *
from precision_kernels.reference.quantise import *
from precision_kernels.reference.rotary import *
