"""Dynamic programs as PyTorch modules: losses, a CRF layer, attention and pooling."""

from bellmax.nn.attention import SegmentationAttention
from bellmax.nn.crf import CRF
from bellmax.nn.ctc import CTCLoss
from bellmax.nn.dtw import DTWLoss, SoftAlignment
from bellmax.nn.pooling import SmoothedMax
from bellmax.nn.tags import TagConstraints, tag_constraints
from bellmax.nn.transducer import TransducerLoss

__all__ = [
    "CRF",
    "CTCLoss",
    "DTWLoss",
    "SegmentationAttention",
    "SmoothedMax",
    "SoftAlignment",
    "TagConstraints",
    "TransducerLoss",
    "tag_constraints",
]
