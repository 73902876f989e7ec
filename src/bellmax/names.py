"""Names that people try and that bellmax does not have: its former names, and names of other libraries.

The changelog has the same table of former names.
"""

from __future__ import annotations

RENAMED = {
    "bellmax": {
        "Alignment": "bellmax.SequenceAlignment",
        "Monotone": "bellmax.MonotonicAlignment",
        "Tree": "bellmax.TreeModel",
        "along_column": "bellmax.lattice.along_column",
        "along_row": "bellmax.lattice.along_row",
        "anywhere": "bellmax.lattice.anywhere",
        "apps": "bellmax_apps, a second distribution",
        "cell": "bellmax.lattice.cell",
        "column": "bellmax.lattice.column",
        "corner": "bellmax.lattice.corner",
        "gather": "bellmax.lattice.gather",
        "joint": "bellmax.lattice.cell_label, or bellmax.lattice.cell_class for one class",
        "one_of": "bellmax.lattice.at_class",
        "pair": "bellmax.lattice.pair",
        "row": "bellmax.lattice.row",
        "scalar": "bellmax.lattice.scalar",
    },
    "bellmax.nn": {"SoftAlignment": "bellmax.nn.DTWAlignment"},
}
"""The present name, by module and former name."""

FOREIGN = {
    "bellmax": {
        "AlignmentCRF": "bellmax.SequenceAlignment",
        "CRF": "bellmax.nn.CRF for a layer, or bellmax.Chain.from_scores for a distribution",
        "CTCLoss": "bellmax.nn.CTCLoss",
        "DTWLoss": "bellmax.nn.DTWLoss",
        "DependencyCRF": "bellmax.DependencyTrees",
        "Entmax": "bellmax.Tsallis(1.5)",
        "HMM": "bellmax.Chain.from_scores, with log-probabilities as scores",
        "HSMM": "bellmax.SemiMarkov.from_scores",
        "LinearChainCRF": "bellmax.nn.CRF for a layer, or bellmax.Chain.from_scores for a distribution",
        "NeedlemanWunsch": "bellmax.SequenceAlignment",
        "RNNT": "bellmax.Transducer",
        "RNNTLoss": "bellmax.nn.TransducerLoss",
        "SemiMarkovCRF": "bellmax.SemiMarkov",
        "SmithWaterman": 'bellmax.SequenceAlignment(scores, mode="local")',
        "SoftDTW": "bellmax.nn.DTWLoss, or bellmax.dtw for the function",
        "Softmax": "bellmax.Negentropy",
        "Sparsemax": "bellmax.Tsallis(2)",
        "TreeCRF": "bellmax.SpanTrees",
        "Viterbi": "bellmax.Chain",
        "ctc": "bellmax.CTC",
        "ctc_loss": "bellmax.nn.CTCLoss, or bellmax.CTC(...).value",
        "edit_distance": "bellmax.Lattice, see the page on lattices",
        "entmax": "bellmax.Tsallis(1.5).argmax",
        "forced_align": "bellmax.compat.torchaudio.forced_align, or bellmax.CTC(...).best_labels()",
        "logsumexp": "bellmax.Negentropy().max",
        "maximum_path": "bellmax.compat.monotonic_align.maximum_path, or bellmax.MonotonicAlignment",
        "monotonic_align": "bellmax.MonotonicAlignment",
        "rnnt_loss": "bellmax.nn.TransducerLoss, or bellmax.Transducer(...).value",
        "soft_dtw": "bellmax.dtw",
        "softdtw": "bellmax.dtw",
        "softmax": "bellmax.Negentropy().argmax",
        "sparsemax": "bellmax.Tsallis(2).argmax",
        "viterbi_decode": "bellmax.Chain(...).best_sequence()",
    },
    "bellmax.nn": {
        "CTC": "bellmax.CTC, a distribution, or bellmax.nn.CTCLoss",
        "DTW": "bellmax.nn.DTWLoss or bellmax.nn.DTWAlignment",
        "LinearChainCRF": "bellmax.nn.CRF",
        "RNNTLoss": "bellmax.nn.TransducerLoss",
        "SoftDTW": "bellmax.nn.DTWLoss",
        "SoftDTWLoss": "bellmax.nn.DTWLoss",
    },
}
"""What to use, by module and a name that other libraries have."""


def attribute_error(module: str, name: str) -> AttributeError:
    """The error for an attribute that a module does not have. It says what to use instead, if that is known."""
    if name in RENAMED.get(module, {}):
        return AttributeError(f"{module}.{name} is now {RENAMED[module][name]}")
    if name in FOREIGN.get(module, {}):
        return AttributeError(f"module {module!r} has no attribute {name!r}: use {FOREIGN[module][name]}")
    return AttributeError(f"module {module!r} has no attribute {name!r}")
