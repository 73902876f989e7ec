"""Dynamic programs as PyTorch modules: losses, a CRF layer, attention and pooling."""

from typing import TYPE_CHECKING

from bellmax.names import attribute_error
from bellmax.nn.attention import SegmentationAttention
from bellmax.nn.crf import CRF
from bellmax.nn.ctc import CTCLoss
from bellmax.nn.dtw import DTWAlignment, DTWLoss
from bellmax.nn.hmm import HMM
from bellmax.nn.perturbed import Perturbed
from bellmax.nn.pooling import SmoothedMax
from bellmax.nn.tags import TagConstraints, tag_constraints
from bellmax.nn.transducer import TDTLoss, TransducerLoss

__all__ = [
    "CRF",
    "HMM",
    "CTCLoss",
    "DTWAlignment",
    "DTWLoss",
    "Perturbed",
    "SegmentationAttention",
    "SmoothedMax",
    "TDTLoss",
    "TagConstraints",
    "TransducerLoss",
    "tag_constraints",
]

if not TYPE_CHECKING:  # a type checker reports unknown names itself

    def __getattr__(name):
        raise attribute_error("bellmax.nn", name)
