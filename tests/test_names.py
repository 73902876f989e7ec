"""Former names, names of other libraries, and the table of former names in the changelog."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.names import FOREIGN, PUBLIC, RENAMED

import bellmax as bx
from bellmax import lattice as L
from bellmax.compat import torch_struct

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"
OLD = [(module, name, new) for module, names in RENAMED.items() for name, new in names.items()]
TRIED = [(module, name, new) for module, names in FOREIGN.items() for name, new in names.items()]


def find(dotted: str) -> object:
    """The object with a dotted name."""
    module, *attributes = dotted.split(".")
    found = importlib.import_module(module)
    for name in attributes:
        found = getattr(found, name, None) or importlib.import_module(f"{found.__name__}.{name}")
    return found


@pytest.mark.parametrize(("module", "name", "new"), OLD, ids=[name for _, name, _ in OLD])
def test_a_former_name_says_the_present_one(module: str, name: str, new: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"{module}.{name} is now {new}")):
        getattr(importlib.import_module(module), name)
    line = f"| `{module}.{name}` | "
    assert line in CHANGELOG.read_text(encoding="utf-8")


@pytest.mark.parametrize(("module", "name", "new"), TRIED, ids=[f"{module}.{name}" for module, name, _ in TRIED])
def test_a_name_of_another_library_says_what_to_use(module: str, name: str, new: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"has no attribute '{name}': use {new}")):
        getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("text", [new for _, _, new in OLD + TRIED])
def test_what_the_tables_recommend_exists(text: str) -> None:
    names = re.findall(r"bellmax(?:\.\w+)+", text)
    assert names or text.startswith("bellmax_apps")
    for name in names:
        assert find(name) is not None


@pytest.mark.parametrize("module", PUBLIC)
def test_the_table_has_all_public_names(module: str) -> None:
    assert PUBLIC[module].split() == importlib.import_module(module).__all__


@pytest.mark.parametrize(
    ("module", "name", "advice"),
    [
        ("bellmax", "Chian", "did you mean bellmax.Chain?"),
        ("bellmax", "crf", "use bellmax.nn.CRF for a layer"),
        ("bellmax", "DTWKMeans", "use bellmax.sklearn.DTWKMeans"),
        ("bellmax", "transducer", "did you mean bellmax.Transducer?"),
        ("bellmax", "tag_constraint", "did you mean bellmax.nn.tag_constraints?"),
        ("bellmax.nn", "Chain", "use bellmax.Chain"),
        ("bellmax.nn", "HSMM", "use bellmax.nn.HMM"),
        ("bellmax.nn", "GaussianHMM", "use bellmax.sklearn.HMM"),
        ("bellmax.sklearn", "GaussianHMM", "use bellmax.sklearn.HMM"),
        ("bellmax.nn", "crf_nll", "use bellmax.losses.crf_nll"),
        ("bellmax.losses", "structured_hinge_loss", "did you mean bellmax.losses.structured_hinge?"),
        ("bellmax.sklearn", "DTWKMean", "did you mean bellmax.sklearn.DTWKMeans?"),
        ("bellmax.lattice", "one_of", "use bellmax.lattice.at_class"),
        ("bellmax.lattice", "Move", "use bellmax.Move"),
        ("bellmax.compat", "torch_structs", "did you mean bellmax.compat.torch_struct?"),
        ("bellmax.plots", "alignments", "did you mean bellmax.plots.alignment?"),
    ],
)
def test_a_near_miss_says_what_was_meant(module: str, name: str, advice: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"module '{module}' has no attribute '{name}': {advice}")):
        getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from bellmax import Alignment", "bellmax.Alignment is now bellmax.SequenceAlignment"),
        ("from bellmax import Chain, CRF", "module 'bellmax' has no attribute 'CRF': use bellmax.nn.CRF"),
        ("from bellmax.nn import SoftDTW", "module 'bellmax.nn' has no attribute 'SoftDTW': use bellmax.nn.DTWLoss"),
        (
            "from bellmax.losses import nll",
            "module 'bellmax.losses' has no attribute 'nll': use bellmax.losses.crf_nll",
        ),
        ("from bellmax import nothing", "cannot import name 'nothing' from 'bellmax'"),
    ],
)
def test_an_import_of_a_wrong_name_says_the_right_one(line: str, message: str) -> None:
    with pytest.raises(ImportError, match=re.escape(message)):
        exec(line, {})


def test_no_name_of_the_tables_is_a_module() -> None:
    """A name with advice cannot be imported, so it must not hide a module."""
    for module, name, _ in OLD + TRIED:
        if (module, name) != ("bellmax", "apps"):
            assert importlib.util.find_spec(module).submodule_search_locations is None or (
                importlib.util.find_spec(f"{module}.{name}") is None
            )


def test_modules_can_be_imported_from_the_package() -> None:
    code = "from bellmax import onnx, nn, info; from bellmax.compat import torchcrf; import bellmax; bellmax.plots.dag"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_other_names_raise_the_usual_error() -> None:
    for module in (bx, bx.nn, bx.losses, bx.sklearn, bx.lattice, bx.compat, bx.plots):
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'nothing'$"):
            _ = module.nothing
    assert not hasattr(bx, "__wrapped__")


def test_the_words_of_lattices_are_a_module() -> None:
    assert bx.lattice is L
    assert not set(L.__all__) & set(dir(bx))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bx.Lattice([bx.Move(1, 0)]).paths({}, lengths=(2, 1)), r"no argument 'lengths': use grid=\(rows, col"),
        (lambda: bx.sklearn.DTWKernel(gamma=2.0), r"no argument 'gamma': use length_scale=, the square root of gamma"),
        (
            lambda: bx.DTW(torch.zeros(2, 2), metric="l2"),
            r"pass the cost of each pair, such as torch.cdist\(x, y\), or",
        ),
        (lambda: bx.DTW(torch.zeros(2, 2), window=1), "no argument 'window': use band="),
        (lambda: bx.dtw(torch.zeros(2), torch.zeros(2), metric="euclidean"), "no argument 'metric': use cost="),
        (lambda: bx.Chain(torch.zeros(2, 2, 2), temperature=2.0), "no argument 'temperature': use gamma="),
        (
            lambda: bx.BeliefPropagation([(0, 1)])(torch.zeros(2, 2), torch.zeros(2, 2), temperature=2.0),
            "no argument 'temperature': use gamma=",
        ),
        (
            lambda: bx.Chain(torch.zeros(2, 2, 2), batch_first=True),
            r"^Chain\(\) has no argument 'batch_first': inputs are",
        ),
        (
            lambda: bx.CTC(torch.zeros(5, 4), [1, 2], input_lengths=5),
            r"^CTC\(\) has no argument 'input_lengths': use lengths=\(input_lengths, target_lengths\)$",
        ),
        (lambda: bx.CTC(torch.zeros(5, 4), [1, 2], blank_id=0), "no argument 'blank_id': use blank="),
        (lambda: bx.SequenceAlignment(torch.zeros(3, 3), gap_penalty=-1.0), "'gap_penalty': use gap_open="),
        (lambda: bx.SequenceAlignment(torch.zeros(3, 3), local=True), "no argument 'local': use mode=\"local\""),
        (lambda: bx.DTW(torch.zeros(2, 2), subsequence=True), "use open_begin=True, open_end=True"),
        (
            lambda: bx.DTW(torch.zeros(2, 2), 1),
            r"DTW\(\) takes 1 positional argument \(cost\), got 2: pass the others as",
        ),
        (lambda: bx.dtw_cdist([[1.0, 2.0]], n_jobs=2), r"use torch.set_num_threads\(n\)"),
        (lambda: bx.dtw_cdist([[1.0, 2.0]], use_c=True), "no argument 'use_c': its arguments are xs, ys, cost, band"),
        (lambda: bx.DAG([(0, 1)], source=0), r"^DAG\(\) has no argument 'source': use start="),
        (lambda: bx.DAG([(0, 1)]).paths(torch.zeros(1), costs=True), "no argument 'costs': use minimize="),
        (lambda: bx.DependencyTrees(torch.zeros(3, 3), multiroot=True), "use single_root=not multiroot"),
        (lambda: bx.Hypergraph([("a", ())], root="a"), "no argument 'root': use goal="),
        (lambda: bx.TreeModel([-1, 0], gama=1), "no argument 'gama': its arguments are parents"),
        (lambda: bx.Negentropy(temperature=2.0), r"^Negentropy\(\) has no argument 'temperature': use gamma="),
        (lambda: bx.Tsallis(1.5, gama=2.0), r"^Tsallis\(\) has no argument 'gama': did you mean gamma=\?"),
        (lambda: bx.Hard(gamma=1.0), "no argument 'gamma': it takes no arguments"),
        (
            lambda: bx.nn.CRF(3, batch_first=True),
            r"^CRF\(\) has no argument 'batch_first': inputs are always batch-first",
        ),
        (lambda: bx.nn.CRF(num_classes=3), "no argument 'num_classes': use num_tags="),
        (
            lambda: bx.nn.CTCLoss()(torch.zeros(5, 4), torch.tensor([1, 2]), input_lengths=5),
            "no argument 'input_lengths': use lengths=",
        ),
        (lambda: bx.nn.tag_constraints(["O"], encoding="IOB2"), "no argument 'encoding': use scheme="),
        (lambda: bx.losses.crf_nll(None, None, reduce=True), "no argument 'reduce': use reduction="),
        (lambda: bx.losses.surrogate(None, labels=None), "no argument 'labels': use target="),
        (
            lambda: bx.sklearn.DTWNeighborsClassifier(metric="dtw"),
            "^DTWNeighborsClassifier.. has no argument 'metric': use",
        ),
        (lambda: bx.sklearn.DTWKMeans(k=3), "no argument 'k': use n_clusters="),
        (lambda: bx.sklearn.HMM(n_components=3), r"^HMM\(\) has no argument 'n_components': use n_states="),
        (lambda: bx.sklearn.HMM(num_states=3), "no argument 'num_states': use n_states="),
        (lambda: bx.sklearn.HMM(emission="poisson"), "no argument 'emission': use emissions="),
        (lambda: bx.sklearn.HMM(covariance_type="diag"), "no argument 'covariance_type': use covariance="),
        (lambda: bx.sklearn.HMM(min_covar=1.0), "no argument 'min_covar': use variance_floor="),
        (lambda: bx.sklearn.HMM(n_iter=10), "no argument 'n_iter': use max_iter="),
        (lambda: bx.sklearn.HMM(init_params="st"), "no argument 'init_params': use init={\"means\": ...} for the"),
        (lambda: bx.sklearn.HMM(transmat=[[1.0]]), "no argument 'transmat': use init={\"transmat\": ...}"),
        (lambda: bx.sklearn.HMM(startprob_prior=2.0), "no argument 'startprob_prior': use priors={\"startprob\": ...}"),
        (lambda: bx.sklearn.HMM(covars_weight=2.0), "no argument 'covars_weight': use priors={\"covars_weight\": ...}"),
        (lambda: bx.sklearn.HMM(algorithm="map"), "no argument 'algorithm': predict is the Viterbi algorithm; for"),
        (
            lambda: bx.sklearn.HMM(omega="sparsemax"),
            r"no argument 'omega': EM is for negentropy only; use predict_proba",
        ),
        (
            lambda: bx.sklearn.HMM().fit([[1.0, 2.0]], lengths=[2]),
            r"^HMM.fit\(\) has no argument 'lengths': pass a list",
        ),
        (lambda: bx.sklearn.HMM().sample(n_samples=3), "no argument 'n_samples': use n_steps="),
        (lambda: bx.sklearn.HMM().forecast([[1.0, 2.0]], horizon=3), "no argument 'horizon': use steps="),
        (lambda: bx.nn.HMM(n_components=3), "no argument 'n_components': use num_states="),
        (lambda: bx.Chain(torch.zeros(2, 2, 2)).sample(num_samples=3), r"use sample_shape=\(num_samples,\)"),
        (lambda: bx.Chain(torch.zeros(2, 2, 2)).topk(n=3), "no argument 'n': use k="),
        (lambda: bx.backend_info(verbose=True), "no argument 'verbose': its arguments are device, routes"),
    ],
)
def test_former_and_foreign_arguments_say_the_present_one(call, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_warnings_of_a_model_name_the_line_of_the_caller() -> None:
    series = [[0.0, 0.5, 3.0, 3.1]]
    with pytest.warns(UserWarning, match="did not converge") as warned:
        bx.sklearn.HMM(2, max_iter=1, random_state=0).fit(series)
    with pytest.warns(UserWarning, match="one label for each series") as ignored:
        bx.sklearn.HMM(2, max_iter=1, tol=None, random_state=0).fit(series, [0])
    assert {warning.filename for warning in (*warned, *ignored)} == {__file__}


def squared(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1)


@pytest.mark.parametrize("method", ["sample", "sample_decoded", "sample_sequences"])
def test_a_number_of_samples_says_the_shape(method: str) -> None:
    draw = getattr(bx.Chain(torch.zeros(2, 2, 2)), method)
    with pytest.raises(ValueError, match=r"sample_shape must be a tuple, got 10: for 10 samples, pass \(10,\)"):
        draw(10)
    with pytest.raises(ValueError, match="sample_shape must be a tuple of integers, got 'ab'"):
        draw("ab")


CHANGE = bx.Move(1, 1, score=L.pair("change", "a", "b", -1, -1) - 0.5 * L.cell_class("c", 3, 0, -1) + 1)


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (L.cell("c", -1) + 1.0, "c[i-1, j] + 1.0"),
        (-L.column("gap", 2) + "open", "-gap[j+2] + open"),
        (L.at_class("p", 0) + L.gather("p", "y", 0, -1), "p[i, 0] + p[i, y[j-1]]"),
        (2 * L.cell_label("joint", "y") - L.row("r"), "2.0 * joint[i, j, y[j]] - r[i]"),
        (CHANGE.score, "change[a[i-1], b[j-1]] - 0.5 * c[i, j-1, 3] + 1.0"),
        (
            bx.Lattice([bx.Move(1, 0, score="up"), bx.Move(0, 1, score=1.0)]),
            "Lattice(states=1, moves=2, scores=['up'])",
        ),
        (bx.BeliefPropagation([(0, 1), (1, 2), (2, 0)]), "BeliefPropagation(num_nodes=3, num_edges=3)"),
        (
            bx.SequenceAlignment(torch.zeros(2, 3, 4), gap_open=-1.0, mode="local"),
            "SequenceAlignment(batch_shape=(2,), rows=3, columns=4, mode='local', omega=Negentropy(gamma=1.0))",
        ),
        (
            bx.CTC(torch.zeros(5, 4), torch.tensor([1, 2]), omega="sparsemax"),
            "CTC(batch_shape=(), event_shape=(5, 4), blank=0, omega=Tsallis(alpha=2.0, gamma=1.0))",
        ),
        (
            bx.DTW(torch.zeros(4, 5), band=2, open_begin=True),
            "DTW(batch_shape=(), event_shape=(4, 5), band=2.0, open_begin=True, omega=Negentropy(gamma=1.0))",
        ),
        (
            bx.DTW(torch.zeros(4, 5), omega="hard"),
            "DTW(batch_shape=(), event_shape=(4, 5), omega=Hard())",
        ),
        (
            bx.DependencyTrees(torch.zeros(3, 3), single_root=False),
            "DependencyTrees(batch_shape=(), event_shape=(3, 3), single_root=False, omega=Negentropy(gamma=1.0))",
        ),
        (
            bx.DAG([(0, 1), (0, 1)]).paths(torch.zeros(4, 2), minimize=True),
            "DAGPaths(batch_shape=(4,), event_shape=(2,), minimize=True, omega=Negentropy(gamma=1.0))",
        ),
        (
            bx.Lattice([bx.Move(1, 1, score=L.cell("c", -1, -1))]).paths(
                {"c": torch.zeros(3, 4)}, minimize=True, band=2
            ),
            "LatticePaths(batch_shape=(), event_shape=(3, 4), grid=4 rows × 5 columns, band=2.0, minimize=True, "
            "omega=Negentropy(gamma=1.0))",
        ),
        (bx.Move(1, 1, score=L.cell("c")), "Move(1, 1, score=c[i, j])"),
        (bx.Move(0, 1, (0, 1), 1, where="open"), "Move(0, 1, source=(0, 1), target=1, where='open')"),
        (L.corner(), "corner(0)"),
        (L.along_row(0, 2), "along_row(0, 2)"),
        (L.along_column({0: None, 1: L.row("late")}), "along_column({0: None, 1: late[i]})"),
        (L.anywhere(1), "anywhere(1)"),
        (bx.Negentropy(torch.nn.Parameter(torch.tensor(0.1))), "Negentropy(gamma=Parameter(0.1))"),
        (bx.Tsallis(1.5, gamma=torch.ones(3)), "Tsallis(alpha=1.5, gamma=tensor of shape (3,))"),
        (bx.SquaredL2(torch.tensor(2.0, device="meta")), "SquaredL2(gamma=tensor of shape ())"),
        (
            bx.nn.tag_constraints(["O", "B-X", "I-X"]),
            "TagConstraints(scheme='IOB2', num_tags=3, forbidden_transitions=1)",
        ),
        (
            bx.nn.CRF(3, constraints=bx.nn.tag_constraints(["O", "B-X", "I-X"])),
            "CRF(3, omega=Negentropy(gamma=1.0), loss='surrogate', constraints='IOB2')",
        ),
        (
            bx.nn.DTWAlignment(cost=squared),
            "DTWAlignment(omega=Negentropy(gamma=1.0), cost='squared', band=None)",
        ),
        (
            torch_struct.LinearChainCRF(torch.zeros(2, 3, 4, 4)),
            "LinearChainCRF(batch_shape=(2,), event_shape=(3, 4, 4))",
        ),
        (bx.TreeModel([-1, 0, 0]), "TreeModel(num_nodes=3, root=0)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_representations_are_short(thing: object, text: str) -> None:
    assert repr(thing) == text


def test_help_names_everything_public() -> None:
    """The docstring of the package groups its names by job."""
    assert bx.__doc__ is not None
    missing = [name for name in bx.__all__ if f"``{name}``" not in bx.__doc__ and name not in ("PathDistribution",)]
    assert missing == ["__version__", "lattice"]
