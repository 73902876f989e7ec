"""Names that people try and that bellmax does not have: its former names, names of other libraries, and misspellings.

The first part is about attributes of modules, the second about arguments. The changelog has the same table of former
names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar, cast

# --- attributes of modules

PUBLIC = {
    "bellmax": (
        "CTC DAG DTW Automaton BeliefPropagation CTCDecoder Chain DependencyTrees Hard Hypergraph Lattice "
        "MonotonicAlignment Move Negentropy PathDistribution Regularizer SemiMarkov SequenceAlignment SpanTrees "
        "SquaredL2 Transducer TreeModel Tsallis __version__ backend_info check_program check_regularizer cluster "
        "compat dtw dtw_barycenter dtw_cdist dtw_neighbors lattice losses nn plots program sklearn use_backend "
        "viterbi"
    ),
    "bellmax.nn": (
        "CRF HMM CTCLoss DTWAlignment DTWLoss Perturbed SegmentationAttention SmoothedMax TDTLoss TagConstraints "
        "TransducerLoss tag_constraints"
    ),
    "bellmax.losses": (
        "alignment_area crf_nll expected_cost hamming_cost mean_absolute_deviation path_nll relaxed risk "
        "structured_hinge structured_perceptron surrogate"
    ),
    "bellmax.sklearn": (
        "HMM DTWBarycenterClassifier DTWKMeans DTWKernel DTWNeighborsClassifier DTWNeighborsRegressor "
        "DTWNeighborsTransformer"
    ),
    "bellmax.lattice": (
        "Score along_column along_row anywhere at_class cell cell_class cell_label column corner gather pair row scalar"
    ),
    "bellmax.compat": "entmax monotonic_align soft_dtw_cuda torch torch_struct torchaudio torchcrf tslearn",
    "bellmax.plots": "alignment automaton dag program",
    "bellmax.cluster": "Task plan",
}
"""The public names of each module, without importing it."""

RENAMED = {
    "bellmax": {
        "Alignment": "bellmax.SequenceAlignment",
        "Monotone": "bellmax.MonotonicAlignment",
        "Tree": "bellmax.TreeModel",
        "along_column": "bellmax.lattice.along_column",
        "along_row": "bellmax.lattice.along_row",
        "anywhere": "bellmax.lattice.anywhere",
        "apps": "bellmax_apps, a separate package",
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
        "BaumWelch": "bellmax.sklearn.HMM(...).fit(series)",
        "CKY": "bellmax.SpanTrees",
        "CRF": "bellmax.nn.CRF for a layer, or bellmax.Chain.from_scores for a distribution",
        "CategoricalHMM": 'bellmax.sklearn.HMM(emissions="categorical")',
        "Constituency": "bellmax.SpanTrees",
        "DenseHMM": "bellmax.sklearn.HMM",
        "DependencyCRF": "bellmax.DependencyTrees",
        "Distribution": "bellmax.PathDistribution",
        "Eisner": "bellmax.DependencyTrees",
        "Entmax": "bellmax.Tsallis(1.5)",
        "FSA": "bellmax.Automaton",
        "FST": "bellmax.Automaton",
        "GMMHMM": "bellmax.sklearn.HMM with an object of your own for emissions=",
        "GaussianHMM": "bellmax.sklearn.HMM",
        "Graph": "bellmax.DAG, or bellmax.Hypergraph",
        "HMM": (
            "bellmax.sklearn.HMM to fit by EM, bellmax.nn.HMM for a layer, or bellmax.Chain.from_scores for a "
            "distribution"
        ),
        "HSMM": "bellmax.sklearn.HMM or bellmax.nn.HMM, with max_duration=, or bellmax.SemiMarkov.from_scores",
        "KNeighborsTimeSeriesClassifier": "bellmax.sklearn.DTWNeighborsClassifier",
        "L2": "bellmax.SquaredL2, or bellmax.Tsallis(2), which does not penalize long paths",
        "LCSS": "bellmax.Lattice, see the page on lattices",
        "LinearChain": "bellmax.Chain",
        "LinearChainCRF": "bellmax.nn.CRF for a layer, or bellmax.Chain.from_scores for a distribution",
        "MAS": "bellmax.MonotonicAlignment(...).best_path()",
        "MultinomialHMM": 'bellmax.sklearn.HMM(emissions="categorical"), for one symbol in each step',
        "NeedlemanWunsch": "bellmax.SequenceAlignment",
        "PCFG": "bellmax.SpanTrees, or bellmax.Hypergraph for a grammar",
        "PoissonHMM": 'bellmax.sklearn.HMM(emissions="poisson")',
        "RNNT": "bellmax.Transducer",
        "RNNTLoss": "bellmax.nn.TransducerLoss",
        "Segmentation": "bellmax.SemiMarkov",
        "SemiMarkovCRF": "bellmax.SemiMarkov",
        "SmithWaterman": 'bellmax.SequenceAlignment(scores, mode="local")',
        "SoftDTW": "bellmax.nn.DTWLoss, or bellmax.dtw for the function",
        "SoftDTWLoss": "bellmax.nn.DTWLoss",
        "Softmax": "bellmax.Negentropy",
        "Sparsemax": "bellmax.Tsallis(2)",
        "TDT": "bellmax.nn.TDTLoss",
        "TimeSeriesKMeans": "bellmax.sklearn.DTWKMeans",
        "TreeCRF": "bellmax.SpanTrees",
        "Viterbi": "bellmax.Chain",
        "backend": "bellmax.backend_info or bellmax.use_backend",
        "barycenter": "bellmax.dtw_barycenter",
        "baum_welch": "bellmax.sklearn.HMM(...).fit(series)",
        "best_path": "the method of a distribution, such as bellmax.Chain(...).best_path()",
        "cdist": "bellmax.dtw_cdist",
        "ctc": "bellmax.CTC",
        "ctc_loss": "bellmax.nn.CTCLoss, or bellmax.CTC(...).value",
        "dtw_alignment": "bellmax.DTW(cost).decode(), or bellmax.nn.DTWAlignment",
        "dtw_distance": 'bellmax.dtw(x, y, omega="hard")',
        "dtw_path": "bellmax.DTW(cost).decode()",
        "edit_distance": "bellmax.Lattice, see the page on lattices",
        "entmax": "bellmax.Tsallis(1.5).argmax",
        "forced_align": "bellmax.compat.torchaudio.forced_align, or bellmax.CTC(...).decode()",
        "forced_alignment": "bellmax.CTC(...).decode()",
        "forward_algorithm": "bellmax.Chain(...).value",
        "forward_backward": "bellmax.Chain(...).marginals",
        "get_backend": "bellmax.backend_info",
        "layers": "bellmax.nn",
        "levenshtein": "bellmax.Lattice, see the page on lattices",
        "log_partition": "the property value of a distribution, such as bellmax.Chain(...).value",
        "logZ": "the property value of a distribution, such as bellmax.Chain(...).value",
        "logsumexp": "bellmax.Negentropy().max",
        "marginals": "the property of a distribution, such as bellmax.Chain(...).marginals",
        "maximum_path": "bellmax.compat.monotonic_align.maximum_path, or bellmax.MonotonicAlignment",
        "monotonic_align": "bellmax.MonotonicAlignment",
        "needleman_wunsch": "bellmax.SequenceAlignment",
        "pairwise_distances": "bellmax.dtw_cdist",
        "rnnt_loss": "bellmax.nn.TransducerLoss, or bellmax.Transducer(...).value",
        "sample": "the method of a distribution, such as bellmax.Chain(...).sample()",
        "set_backend": "bellmax.use_backend",
        "smith_waterman": 'bellmax.SequenceAlignment(scores, mode="local")',
        "soft_dtw": "bellmax.dtw",
        "soft_dtw_alignment": "bellmax.nn.DTWAlignment, or bellmax.DTW(cost).expected_path",
        "softdtw": "bellmax.dtw",
        "softdtw_barycenter": "bellmax.dtw_barycenter",
        "softmax": "bellmax.Negentropy().argmax",
        "sparsemax": "bellmax.Tsallis(2).argmax",
        "subsequence_dtw": "bellmax.DTW(cost, open_begin=True, open_end=True)",
        "tdt_loss": "bellmax.nn.TDTLoss",
        "version": "bellmax.__version__",
        "viterbi_decode": "bellmax.Chain(...).decode()",
    },
    "bellmax.nn": {
        "Attention": "bellmax.nn.SegmentationAttention",
        "CRFLoss": "bellmax.nn.CRF, which returns the loss",
        "CTC": "bellmax.CTC, a distribution, or bellmax.nn.CTCLoss",
        "ConditionalRandomField": "bellmax.nn.CRF",
        "DTW": "bellmax.nn.DTWLoss or bellmax.nn.DTWAlignment",
        "Entmax15": "bellmax.compat.entmax.Entmax15",
        "HSMM": "bellmax.nn.HMM, with max_duration=",
        "LinearChainCRF": "bellmax.nn.CRF",
        "RNNTLoss": "bellmax.nn.TransducerLoss",
        "SoftDTW": "bellmax.nn.DTWLoss",
        "SoftDTWLoss": "bellmax.nn.DTWLoss",
        "Sparsemax": "bellmax.compat.entmax.Sparsemax",
        "StructuredAttention": "bellmax.nn.SegmentationAttention",
    },
    "bellmax.losses": {
        "CRFLoss": "bellmax.losses.crf_nll, or bellmax.nn.CRF for a layer",
        "area": "bellmax.losses.alignment_area",
        "cross_entropy": "bellmax.losses.crf_nll",
        "ctc": "bellmax.nn.CTCLoss",
        "ctc_loss": "bellmax.nn.CTCLoss",
        "dtw": "bellmax.nn.DTWLoss, or bellmax.dtw for the function",
        "fenchel_young": "bellmax.losses.surrogate",
        "hamming": "bellmax.losses.hamming_cost",
        "hinge": "bellmax.losses.structured_hinge",
        "hinge_loss": "bellmax.losses.structured_hinge",
        "mad": "bellmax.losses.mean_absolute_deviation",
        "mwer": "bellmax.losses.risk",
        "neg_log_likelihood": "bellmax.losses.crf_nll",
        "nll": "bellmax.losses.crf_nll",
        "nll_loss": "bellmax.losses.crf_nll",
        "perceptron": "bellmax.losses.structured_perceptron",
        "reinforce": "bellmax.losses.risk",
        "rnnt_loss": "bellmax.nn.TransducerLoss",
    },
    "bellmax.sklearn": {
        "DTWBarycenter": "bellmax.dtw_barycenter",
        "DTWClassifier": "bellmax.sklearn.DTWNeighborsClassifier",
        "DTWKNN": "bellmax.sklearn.DTWNeighborsClassifier",
        "DTWSVC": "bellmax.sklearn.DTWKernel in a pipeline with SVC(kernel='precomputed')",
        "GAK": "bellmax.sklearn.DTWKernel",
        "HSMM": "bellmax.sklearn.HMM, with max_duration=",
        "KMeans": "bellmax.sklearn.DTWKMeans",
        "KNeighborsClassifier": "bellmax.sklearn.DTWNeighborsClassifier",
        "NearestNeighbors": "bellmax.sklearn.DTWNeighborsTransformer, or bellmax.dtw_neighbors",
    },
    "bellmax.lattice": {
        "end": "the argument end= of bellmax.Lattice, with bellmax.lattice.corner or bellmax.lattice.anywhere",
        "first_row": "bellmax.lattice.along_row",
        "last_row": "bellmax.lattice.along_row",
        "start": "the argument start= of bellmax.Lattice, with bellmax.lattice.corner or bellmax.lattice.anywhere",
    },
    "bellmax.compat": {
        "TorchCRF": "bellmax.compat.torchcrf",
        "aeon": "bellmax.dtw_cdist, or bellmax.sklearn",
        "crf": "bellmax.compat.torchcrf",
        "dtaidistance": "bellmax.dtw_cdist",
        "k2": "bellmax.Transducer",
        "monotonic_alignment_search": "bellmax.compat.monotonic_align",
        "pysdtw": "bellmax.compat.soft_dtw_cuda",
        "pytorch_crf": "bellmax.compat.torchcrf",
        "soft_dtw": "bellmax.compat.soft_dtw_cuda",
        "softdtw": "bellmax.compat.soft_dtw_cuda",
        "torch_crf": "bellmax.compat.torchcrf",
        "warp_rnnt": "bellmax.compat.torchaudio.rnnt_loss",
    },
    "bellmax.plots": {
        "dtw": "bellmax.plots.alignment",
        "graph": "bellmax.plots.dag",
        "heatmap": "bellmax.plots.alignment",
        "path": "bellmax.plots.dag or bellmax.plots.alignment",
        "warping_path": "bellmax.plots.alignment",
    },
}
"""The replacement for each name of another library, by module."""


def attribute_error(module: str, name: str) -> AttributeError | ImportError:
    """Return the error for an attribute that a module does not have. It says what to use instead, if that is known.

    For ``from module import name``, Python would replace an ``AttributeError`` by an ``ImportError`` without advice, so
    this is an ``ImportError`` if there is advice.
    """
    if name in RENAMED.get(module, {}):
        message, has_advice = f"{module}.{name} is now {RENAMED[module][name]}", True
    else:
        advice = "" if name.startswith("_") else _advice(module, name)
        message, has_advice = f"module {module!r} has no attribute {name!r}{advice}", bool(advice)
    # This function is called by __getattr__ of the module, and that by hasattr in the import system.
    is_imported = sys._getframe(2).f_code.co_name == "_handle_fromlist"
    return ImportError(message, name=module) if is_imported and has_advice else AttributeError(message)


def _advice(module: str, name: str) -> str:
    """Return what to use instead of a name, from the tables or by its spelling, or "" if nothing is near."""
    everywhere = RENAMED["bellmax"] | FOREIGN["bellmax"]
    for table in (FOREIGN.get(module, {}), everywhere):
        known = {foreign.lower(): advice for foreign, advice in table.items()}
        if name in table or name.lower() in known:
            return f": use {table.get(name) or known[name.lower()]}"
    homes: dict[str, str] = {}
    for home in (module, *PUBLIC):
        for public in PUBLIC[home].split():
            if public == name:
                return f": use {home}.{public}"
            homes.setdefault(public.lower(), f"{home}.{public}")
    near = get_close_matches(name.lower(), homes, n=1, cutoff=0.75)
    return f": did you mean {homes[near[0]]}?" if near else ""


# --- arguments

_F = TypeVar("_F", bound=Callable[..., Any])

_FOREIGN_ARGUMENTS: Mapping[str, str] = {
    "attention_mask": "mask",
    "axis": "dim",
    "band_size": "band",
    "bandwidth": "band length_scale",
    "barycenter_size": "length",
    "blank_id": "blank",
    "blank_index": "blank",
    "blank_token_id": "blank",
    "cost_matrix": "cost",
    "covariance_type": "covariance",
    "costs": "cost minimize",
    "dist": "cost",
    "dist_func": "cost",
    "dist_method": "cost",
    "distance": "cost",
    "emission": "emissions",
    "emissions": "emission",
    "encoding": "scheme",
    "end_transitions": "end",
    "fastemit_lambda": "fastemit",
    "final": "end",
    "gap": "gap_open",
    "gap_extension": "gap_extend",
    "gap_penalty": "gap_open",
    "horizon": "steps",
    "extend_gap_score": "gap_extend",
    "ignore_label": "ignore_index",
    "init": "start",
    "init_barycenter": "init",
    "initial": "start",
    "k": "n_neighbors n_clusters topk",
    "labelled": "labels",
    "labels": "tags targets target",
    "length": "lengths",
    "lens": "lengths",
    "mask": "lengths",
    "max_iters": "max_iter iterations",
    "min_covar": "variance_floor",
    "max_iter": "iterations",
    "maxiter": "max_iter iterations",
    "method": "mode",
    "metric": "cost",
    "n": "k",
    "n_best": "topk",
    "n_classes": "num_tags",
    "n_iter": "max_iter iterations",
    "n_neighbors": "k",
    "n_components": "n_states num_states",
    "n_samples": "samples n_steps",
    "n_states": "num_states",
    "n_steps": "steps",
    "n_tags": "num_tags",
    "normalized": "normalize",
    "num_classes": "num_tags",
    "num_iterations": "iterations max_iter",
    "num_iters": "max_iter iterations",
    "num_labels": "num_tags",
    "num_samples": "samples",
    "num_states": "n_states",
    "open_gap_score": "gap_open",
    "open_start": "open_begin",
    "penalty": "step_penalties",
    "radius": "band",
    "regularizer": "omega",
    "root": "goal",
    "sakoe_chiba_radius": "band",
    "sakoechiba": "band",
    "seq_lengths": "lengths",
    "seq_lens": "lengths",
    "shape": "grid",
    "sigma": "length_scale",
    "sink": "end",
    "smoothing": "gamma",
    "source": "start",
    "start_transitions": "start",
    "tau": "gamma",
    "temperature": "gamma",
    "transition": "transitions",
    "transition_matrix": "transitions",
    "type": "mode",
    "verbose": "progress",
    "weight": "weights",
    "window": "band",
    "window_size": "band",
    "y_true": "target targets tags",
}
"""The arguments to use, by the name in another library. The first one that a function has is recommended."""

_FOREIGN_LENGTHS = ("input_lengths", "target_lengths", "logit_lengths", "label_lengths", "sequence_lengths")
_LENGTHS_PAIR = "lengths=(input_lengths, target_lengths)"
_HINTS = {
    "backend": "use with bellmax.use_backend(name)",
    "batch_first": "inputs are always batch-first, (batch, time, ...). Leave it out, and swap the dimensions of "
    "time-first inputs with x.transpose(0, 1)",
    "device": "results are on the device of the inputs: move the inputs",
    "n_jobs": "use torch.set_num_threads(n)",
    "parallel": "all threads are used; to change their number, use torch.set_num_threads(n)",
    "use_cuda": "results are on the device of the inputs: move the inputs",
}
_HINTS_BESIDE = {
    "alpha": ("omega", "use omega=bellmax.Tsallis(alpha)"),
    "attn_mask": ("is_causal", "use mask=, True at the keys to use"),
    "average": ("reduction", 'use reduction="mean"'),
    "gamma": ("length_scale", "use length_scale=, the square root of gamma"),
    "global_constraint": ("band", "use band=, the half-width of a Sakoe–Chiba band"),
    "hard": ("omega", 'use omega="hard"'),
    "key_padding_mask": ("is_causal", "use mask=~key_padding_mask, True at the keys to use"),
    "keepdim": ("dim", "use .unsqueeze(dim) on the result"),
    "lengths": ("grid", "use grid=(rows, columns), which counts cells: often one more than the lengths of sequences"),
    "local": ("mode", 'use mode="local"'),
    "margin": ("cost", "use cost=, such as bellmax.losses.hamming_cost(p, target)"),
    "maximize": ("minimize", "use minimize=True for costs; scores are maximized by default"),
    "multiroot": ("single_root", "use single_root=not multiroot"),
    "n": ("sample_shape", "use sample_shape=(n,)"),
    "n_samples": ("sample_shape", "use sample_shape=(n_samples,)"),
    "num_samples": ("sample_shape", "use sample_shape=(num_samples,)"),
    "padding_mask": ("mask", "use mask=~padding_mask, True at the steps to keep"),
    "psi": ("open_end", "use open_begin=True or open_end=True"),
    "reduce": ("reduction", 'use reduction="none", "sum" or "mean"'),
    "size_average": ("reduction", 'use reduction="sum" or "mean"'),
    "step_pattern": ("step_weights", "use step_weights= or step_penalties="),
    "subsequence": ("open_end", "use open_begin=True, open_end=True"),
    # hidden Markov models
    "algorithm": ("priors", "predict is the Viterbi algorithm; for single states, use predict_proba(X)"),
    "currstate": ("n_steps", "to continue a series, use forecast(X)"),
    "implementation": ("priors", "leave it out: the one implementation does not underflow"),
    "init_params": ("priors", 'use init={"means": ...} for the parameters that you know'),
    "omega": (
        "priors",
        "EM is for negentropy only; use predict_proba(X, omega=...) for sparse posteriors, and bellmax.nn.HMM to train "
        "under another regularizer",
    ),
    "params": ("priors", "EM updates all parameters"),
}
"""An argument of the function, and the hint for a foreign name if the function has that argument."""

_PARAMETERS_OF_HMM = "startprob", "transmat", "durations", "means", "covars", "emissionprob", "lambdas"


def _hints(parameters: Mapping[str, Parameter]) -> dict[str, str]:
    """Return the hints for arguments that a function does not have, by their names."""
    hints = dict(_HINTS)
    if "lengths" in parameters:
        hints |= dict.fromkeys(_FOREIGN_LENGTHS, f"use {_LENGTHS_PAIR if _takes_a_pair(parameters) else 'lengths='}")
    hints |= {foreign: hint for foreign, (needed, hint) in _HINTS_BESIDE.items() if needed in parameters}
    if "priors" in parameters:
        hints |= {name: f'use init={{"{name}": ...}}' for name in _PARAMETERS_OF_HMM}
        hints |= {f"{name}_prior": f'use priors={{"{name}": ...}}' for name in _PARAMETERS_OF_HMM}
        hints |= {name: f'use priors={{"{name}": ...}}' for name in ("means_weight", "covars_weight", "lambdas_weight")}
    if "X" in parameters:
        hints["lengths"] = "pass a list of series, such as np.split(X, np.cumsum(lengths)[:-1])"
    if "cost" in list(parameters)[:2]:  # a matrix of costs, the first argument
        hints["metric"] = hints["dist"] = (
            "pass the cost of each pair, such as torch.cdist(x, y), or use bellmax.dtw(x, y)"
        )
    for foreign, names in _FOREIGN_ARGUMENTS.items():
        own = [name for name in names.split() if name in parameters]
        if own and foreign not in hints:
            hints[foreign] = f"use {own[0]}="
    return hints


def _takes_a_pair(parameters: Mapping[str, Parameter]) -> bool:
    """True if the argument ``lengths`` is a pair of lengths."""
    return "lengths" in parameters and "tuple" in str(parameters["lengths"].annotation)


def _hint_by_spelling(name: str, names: Iterable[str]) -> str:
    """Return the argument with a similar name, or a list of all arguments."""
    names = list(names)
    near = get_close_matches(name, names, n=1, cutoff=0.75)
    if near:
        return f"did you mean {near[0]}=?"
    return f"its arguments are {', '.join(names)}" if names else "it takes no arguments"


def answers_near_misses(function: _F) -> _F:
    """Decorate a function to explain wrong arguments: its TypeError translates other libraries' argument names.

    For other names, the TypeError has the argument with a similar name, or all arguments. For too many positional
    arguments, it lists the keyword-only arguments.
    """
    parameters = signature(function).parameters
    hints = _hints(parameters)
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    keyword_only = [name for name, parameter in parameters.items() if parameter.kind is Parameter.KEYWORD_ONLY]
    positional = [name for name in parameters if name not in keyword_only]
    is_method = positional[:1] in (["self"], ["cls"])
    names = dict.fromkeys(list(parameters)[is_method:])

    def name_of(args: tuple[Any, ...]) -> str:
        is_constructor = is_method and function.__name__ == "__init__"
        return type(args[0]).__name__ if is_constructor else function.__qualname__

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in names and not takes_any:
                hint = hints.get(name) or _hint_by_spelling(name, names)
                raise TypeError(f"{name_of(args)}() has no argument {name!r}: {hint}")
        if keyword_only and len(args) > len(positional):
            own = positional[is_method:]
            spelling = {"lengths": _LENGTHS_PAIR} if _takes_a_pair(parameters) else {}
            raise TypeError(
                f"{name_of(args)}() takes {len(own)} positional argument{'s' * (len(own) != 1)} ({', '.join(own)}), "
                f"got {len(args) - is_method}: pass the others as "
                f"{', '.join(spelling.get(n, f'{n}=') for n in keyword_only)}"
            )
        return function(*args, **kwargs)

    return cast(_F, call)
