"""Paths of automata over frames, compared with graphs that are unrolled edge by edge."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from support.automata import Unrolled, random_arcs
from support.checks import close
from support.kernels import needs_kernels
from support.problems import OMEGAS, for_second_order, potentials
from torch import Tensor

import bellmax as bx

INF = math.inf
STEPS, CLASSES = 3, 3
SUPPORTED = [name for name in OMEGAS if name != "l2"]
every_omega = pytest.mark.parametrize("omega", SUPPORTED, indirect=True)
every_kernel = pytest.mark.parametrize(
    ("omega", "backend"),
    [pytest.param(name, "native", marks=needs_kernels) for name in SUPPORTED]
    + [(name, "reference") for name in ("negentropy", "tsallis1.5")],
    indirect=True,
)


class Case:
    """A batch of paths, and each member unrolled."""

    def __init__(self, automata: list[bx.Automaton], is_shared: bool, omega: bx.Regularizer, seed: int = 0) -> None:
        self.lengths = torch.tensor([3, 2, 0])
        stack = automata[0] if len(automata) == 1 else bx.Automaton.stack(automata)
        own = () if is_shared else (3,)
        log_probs = potentials(3, STEPS, CLASSES, seed=seed)
        log_probs[0, 1, 0] = -INF
        log_probs[1, 2:] = math.nan
        scores = potentials(*own, stack.num_arcs, seed=seed + 1)
        scores[..., 0] = -INF
        start = potentials(*own, stack.num_states, seed=seed + 2).masked_fill(stack.start == -INF, -INF)
        final = potentials(*own, stack.num_states, seed=seed + 3).masked_fill(stack.final == -INF, -INF)
        self.inputs = [log_probs, scores, start, final]
        self.p: Any = stack.paths(log_probs, scores=scores, start=start, final=final, lengths=self.lengths, omega=omega)
        self.members = []
        for b, n in enumerate(self.lengths.tolist()):
            automaton = automata[b % len(automata)]
            rest = [t if is_shared else t[b] for t in self.inputs[1:]]
            sizes = automaton.num_arcs, automaton.num_states, automaton.num_states
            arcs = [tuple(row[:3]) for row in automaton.arcs.tolist()]
            rest = [t[:size] for t, size in zip(rest, sizes, strict=True)]
            self.members.append(Unrolled(arcs, log_probs[b, :n], *rest, omega))

    def member(self, b: int, result: Tensor, score: int) -> Tensor:
        """The part of a result, shaped like a score, that belongs to a member and is not padding."""
        return result[b][tuple(map(slice, self.members[b].inputs[score].shape))]

    def is_shared(self) -> bool:
        return self.inputs[1].ndim == 1


def one(omega: bx.Regularizer, epsilon: int = 0, is_shared: bool = True, seed: int = 0) -> Case:
    arcs = random_arcs(seed, 4, 10, CLASSES, epsilon)
    automaton = bx.Automaton([*arcs, (3, 3, 2)], start={0: 0.0, 1: 0.0}, final={1: 0.0, 2: 0.0})
    return Case([automaton], is_shared, omega, seed)


def stacked(omega: bx.Regularizer, epsilon: int = 0, seed: int = 0) -> Case:
    """Automata of different sizes, whose ε-arcs would form a cycle together."""
    automata = []
    for n, states in enumerate((4, 3, 5)):
        arcs = random_arcs(seed + n, states, 6 + 2 * n, CLASSES, epsilon)
        ends = {0: 0.0, states - 1: 0.0}
        automata.append(bx.Automaton([*arcs, (states - 1, 0, 0)], start={0: 0.0, 1: 0.0}, final=ends))
    return Case(automata, False, omega, seed)


CASES: dict[str, Any] = {
    "arcs": lambda omega: one(omega),
    "epsilon": lambda omega: one(omega, 3, seed=1),
    "scores of members": lambda omega: one(omega, 2, is_shared=False, seed=2),
    "stack": lambda omega: stacked(omega),
    "stack, epsilon": lambda omega: stacked(omega, 3, seed=3),
}
every_case = pytest.mark.parametrize("name", CASES)


@every_case
@every_kernel
def test_values_and_derivatives_equal_the_unrolled_graph(name: str, omega: bx.Regularizer, backend: str) -> None:
    case = CASES[name](omega)
    p, names = case.p, ("log_probs", "arcs", "start", "final")
    assert p.backend == backend
    z = [potentials(*t.shape, seed=9 + n) for n, t in enumerate(case.inputs)]
    products, sums = p.hessian_product(dict(zip(names, z, strict=True))), [0.0] * 4
    product_sums: list[Any] = [0.0] * 4
    for b, member in enumerate(case.members):
        if member.graph is None:
            assert p.value[b] == -INF
            continue
        close(p.value[b], member.paths.value)
        gradients = member.onto(member.paths.expected_path)
        z_b = [t[b] if t.ndim > dims else t for t, dims in zip(z, (2, 1, 1, 1), strict=True)]
        z_b = [t[tuple(map(slice, like.shape))] for t, like in zip(z_b, member.inputs, strict=True)]
        second = member.hessian_product(z_b)
        close(
            p.directional_derivative(dict(zip(names, z, strict=True)))[b],
            sum((g * t).sum() for g, t in zip(gradients, z_b, strict=True)),
        )
        close(case.member(b, p.expected_path, 0), gradients[0])
        for n, key in enumerate(names):
            if case.is_shared() and n:
                sums[n], product_sums[n] = sums[n] + gradients[n], product_sums[n] + second[n]
            else:
                close(case.member(b, p.gradient[key], n), gradients[n])
                close(case.member(b, products[key], n), second[n])
    for n, key in enumerate(names):
        if case.is_shared() and n:
            close(p.gradient[key], sums[n])
            close(products[key], product_sums[n])
    assert not p.expected_path[1, 2:].any()
    assert not p.expected_path[2].any()


@every_case
@every_kernel
def test_verbs_equal_the_unrolled_graph(name: str, omega: bx.Regularizer, backend: str) -> None:
    case = CASES[name](omega)
    p = case.p
    top, (scores, arcs) = p.topk(5), p.topk_decoded(5)
    support, probabilities = p.support_paths(10**6)
    for b, member in enumerate(case.members):
        if member.graph is None:
            assert p.num_paths[b] == 0
            assert (p.decode()[b] == -1).all()
            assert not top[1][b].any()
            continue
        q, n = member.paths, len(member.log_probs)
        close(p.entropy()[b], q.entropy())
        assert p.num_paths[b] == q.num_paths
        best = q.topk(5)
        close(top[0][b], best[0])
        close(scores[b], best[0])
        close(top[1][b, :, :n], member.onto(best[1])[0])
        _paths, wanted = q.support_paths(10**6)
        close(probabilities[: len(wanted), b], wanted)
        assert not probabilities[len(wanted) :, b].any()
        close(torch.einsum("k,k...->...", probabilities[:, b], support[:, b]), p.expected_path[b])
        for row, edges in zip(arcs[b].tolist(), best[1], strict=True):
            assert [arc for arc in row if arc >= 0] == member.arcs_of(edges)
        assert [arc for arc in p.decode()[b].tolist() if arc >= 0] == member.arcs_of(q.best_path())
        close(p.arc_marginals()[b, :n, : len(member.scores)], member.by_arc(q.expected_path))
        states = len(member.start)
        values = q.node_values[1:-1].reshape(n + 1, states)  # −∞ also if no path leads from the node to the end
        close(p.node_values[b, : n + 1, :states].where(values > -INF, -INF), values)
        assert (p.node_values[b, n + 1 :] == -INF).all()
        close(p.max_marginals[b, :n], member.best_by_label(q.max_marginals))
        assert (p.max_marginals[b, n:] == -INF).all()


@every_case
@every_kernel
def test_decoded_paths(name: str, omega: bx.Regularizer, backend: str) -> None:
    p = CASES[name](omega).p
    draws, has_path = p.sample_decoded((20,)), p.value > -INF
    events = p.sample((20,))
    assert p.support.check(events)[:, has_path].all()
    assert p.support.check(draws)[:, has_path].all()
    q = p[has_path]
    some = draws[:, has_path]
    paths = q.encode(some)
    assert q.support.check(paths).all()
    assert not q.support.check(torch.ones_like(paths)).any()
    assert q.most_accurate().shape == q.decode().shape
    labels = q.labels(some)
    assert (labels >= 0).sum(-1).equal(q.lengths.expand(labels.shape[:-1]))
    one_hot = torch.nn.functional.one_hot(labels + 1, CLASSES + 1)[..., 1:]
    close(paths, one_hot)
    scores, best = q.topk_decoded(30)
    exists = scores > -INF
    rows = torch.where(exists.unsqueeze(-1), best, best[:, :1]).movedim(1, 0)
    log_prob = q.log_prob(rows)
    if isinstance(omega, bx.Negentropy):
        close(omega.gamma * log_prob, torch.where(exists, scores, scores[:, :1]).T - q.value, 1e-9)
    total = torch.where(exists.T, log_prob.exp(), 0).sum(0)
    assert (total < 1 + 1e-9).all()
    is_whole = q.num_paths <= 30
    close(total[is_whole], torch.ones_like(total[is_whole]))


@pytest.mark.parametrize("steps", range(7))
@every_omega
def test_probabilities_equal_enumeration(steps: int, omega: bx.Regularizer) -> None:
    """Up to six frames: all walks, scored by hand."""
    arcs = [(0, 0, 0), (0, 1, 1), (1, 0, 1), (0, 1, -1)]
    automaton = bx.Automaton(arcs, start={0: 0.5}, final={1: -0.5})
    log_probs, scores = potentials(steps, 2, seed=4), potentials(4, seed=5)
    p = automaton.paths(log_probs, scores=scores, omega=omega)
    walks: dict[tuple[int, ...], float] = {}

    def extend(state: int, t: int, taken: tuple[int, ...], total: float) -> None:
        if t == steps and state == 1:
            walks[taken] = total
        for a, (source, target, label) in enumerate(arcs):
            if source == state and (label < 0 or t < steps):
                emitted = 0.0 if label < 0 else float(log_probs[t, label])
                extend(target, t + (label >= 0), (*taken, a), total + emitted + float(scores[a]))

    extend(0, 0, (), 0.0)
    assert p.num_paths == len(walks)
    top, decoded = p.topk_decoded(len(walks) + 1)
    wanted = sorted(walks.values(), reverse=True)
    close(top[:-1], wanted)
    assert top[-1] == -INF
    assert (decoded[-1] == -1).all()
    assert {tuple(a for a in row if a >= 0) for row in decoded[:-1].tolist()} == set(walks)
    if isinstance(omega, bx.Negentropy):
        close(p.value, omega.gamma * torch.logsumexp(torch.tensor(wanted, dtype=torch.float64) / omega.gamma, 0))
    close(p.log_prob(decoded[:-1]).exp().sum(), 1.0)


@every_omega
def test_most_accurate_is_the_best_path_for_arcs_at_frames(omega: bx.Regularizer) -> None:
    case = one(omega, 2, seed=7)
    p = case.p
    assert p.value[0] > -INF
    got = p.most_accurate()
    for b, member in enumerate(case.members):
        if p.value[b] == -INF:
            continue
        everything = member.graph.paths(member.weights(*member.inputs).detach(), omega="negentropy")
        mu = torch.tensor([0.0 if a is None else 1.0 for *_, a in member.edges]) * 1.0
        gain = mu * (2 * member.paths.expected_path.detach() - 1)
        gains = everything.enumerate_support() @ gain.double()
        path = [arc for arc in got[b].tolist() if arc >= 0]
        scores = {tuple(member.arcs_of(row)): g for row, g in zip(everything.enumerate_support(), gains, strict=True)}
        close(scores[tuple(path)], max(scores.values()))


# --- where automata and other structures coincide


@pytest.mark.parametrize("target", [[1, 2, 2], [1], []])
@every_kernel
def test_equals_ctc(target: list[int], omega: bx.Regularizer, backend: str) -> None:
    log_probs, frames = potentials(3, 6, CLASSES, seed=6), torch.tensor([6, 4, 5])
    if isinstance(omega, bx.Negentropy | bx.Hard):  # other Ω depend on how the graph is written
        p = bx.Automaton.ctc(target).paths(log_probs, lengths=frames, omega=omega)
        q = bx.CTC(
            log_probs, torch.tensor(target, dtype=torch.int64).expand(3, -1), lengths=(frames, len(target)), omega=omega
        )
        close(p.value, q.value)
        close(p.expected_path, q.expected_path)
        close(p.num_paths, q.num_paths)
        z = potentials(3, 6, CLASSES, seed=7)
        close(p.hessian_product(z), q.hessian_product(z))
        assert p.labels(p.decode()).equal(q.decode())


@every_kernel
def test_equals_a_chain(omega: bx.Regularizer, backend: str) -> None:
    states = 3
    emissions, transitions = potentials(2, 5, states, seed=8), potentials(states, states, seed=9)
    lengths = torch.tensor([5, 3])
    arcs = [(0, 1 + s, s) for s in range(states)]
    arcs += [(1 + s, 1 + t, t) for t in range(states) for s in range(states)]
    automaton = bx.Automaton(arcs, final=dict.fromkeys(range(1, 1 + states), 0.0))
    scores = torch.cat((torch.zeros(states), transitions.flatten()))
    p = automaton.paths(emissions, scores=scores, lengths=lengths, omega=omega)
    mask = torch.arange(5) < lengths.unsqueeze(-1)
    q = bx.Chain.from_scores(emissions, transitions, mask=mask, omega=omega)
    close(p.value, q.value)
    close(p.expected_path, q.gradient["emissions"])
    close(p.gradient["arcs"][states:].reshape(states, states), q.gradient["transitions"])
    close(p.entropy(), q.entropy())
    assert p.labels(p.decode()).equal(q.decode())
    draws = p.sample_decoded((5,))
    close(p.log_prob(draws), q.log_prob(p.labels(draws)))


def test_forced_alignment_of_a_sequence() -> None:
    p = bx.Automaton.linear([2, 0, 1]).paths(potentials(3, CLASSES, seed=1))
    assert p.num_paths == 1
    assert p.labels(p.decode()).tolist() == [2, 0, 1]
    close(p.value, p.log_probs[[0, 1, 2], [2, 0, 1]].sum())


# --- derivatives and execution modes


TWO_STATES = bx.Automaton([(0, 0, 0), (0, 1, 1), (1, 1, 2), (1, 0, 1), (0, 1, -1)], final=[0.0, 0.0])


def make(log_probs: Tensor, scores: Tensor, start: Tensor, final: Tensor, **options: Any) -> Any:
    return TWO_STATES.paths(log_probs, scores=scores, start=start, final=final, lengths=torch.tensor([3, 1]), **options)


def inputs() -> list[Tensor]:
    sizes = (2, 3, 3), (5,), (2, 2), (2,)
    return [potentials(*size, seed=n, requires_grad=True) for n, size in enumerate(sizes)]


@for_second_order
def test_derivatives(omega: bx.Regularizer, backend: str) -> None:
    if isinstance(omega, bx.SquaredL2):
        omega = bx.Tsallis(2.0)

    def value(*tensors: Tensor) -> Tensor:
        return make(*tensors, omega=omega).value

    torch.autograd.gradcheck(value, inputs())
    torch.autograd.gradgradcheck(value, inputs())
    p = make(*inputs(), omega=omega)
    numbers = [p.entropy(), p.log_prob(p.decode()), p.topk(2)[0], p.arc_marginals()]
    for number in numbers[: 4 if isinstance(omega, bx.Negentropy) else 1]:
        assert all(
            g is None or g.isfinite().all()
            for g in torch.autograd.grad(number.sum(), list(p.scores.values()), allow_unused=True, retain_graph=True)
        )


def test_gamma_is_a_tensor() -> None:
    gamma = torch.tensor([0.5, 2.0], dtype=torch.float64)
    tensors = [t.detach() for t in inputs()]
    torch.autograd.gradcheck(lambda g: make(*tensors, omega="entmax", gamma=g).value, [gamma.clone().requires_grad_()])
    for b in range(2):
        alone = make(*tensors, omega="entmax", gamma=float(gamma[b]))
        close(make(*tensors, omega="entmax", gamma=gamma).value[b], alone.value[b])


@pytest.mark.parametrize("name", ["negentropy", "sparsemax", "entmax", "hard"])
def test_names_of_omega_and_dtypes(name: str, backend: str) -> None:
    tensors = [t.detach() for t in inputs()]
    p = make(*tensors, omega=name)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 1e-2)):
        q = make(*(t.to(dtype) for t in tensors), omega=name)
        close(q.value.double(), p.value, tolerance)
        assert q.expected_path.dtype == dtype == q.sample((2,)).dtype
        assert q.gradient["arcs"].dtype == dtype
        close(q.log_prob(q.decode()).double(), p.log_prob(q.decode()), 3 * tolerance)


def test_torch_func() -> None:
    tensors = [t.detach() for t in inputs()]
    p = make(*tensors)
    gradient = torch.func.grad(lambda x: make(x, *tensors[1:]).value.sum())(tensors[0])
    close(gradient, p.expected_path)
    many = torch.stack((tensors[0], tensors[0] + 1))
    values = torch.func.vmap(lambda x: make(x, *tensors[1:]).value)(many)
    close(values, torch.stack([make(x, *tensors[1:]).value for x in many]))
    gradients = torch.func.vmap(torch.func.grad(lambda s: make(tensors[0], s, *tensors[2:]).value.sum()))(
        torch.stack((tensors[1], tensors[1] + 1))
    )
    close(gradients[0], p.gradient["arcs"])
    _, slope = torch.func.jvp(lambda x: make(x, *tensors[1:]).value, (tensors[0],), (torch.ones_like(tensors[0]),))
    close(slope, p.directional_derivative(torch.ones_like(tensors[0])))
    entropies = torch.func.vmap(lambda x: make(x, *tensors[1:]).entropy())(many)
    close(entropies, torch.stack([make(x, *tensors[1:]).entropy() for x in many]))


def test_methods_that_read_arcs_do_not_compile() -> None:
    automaton = bx.Automaton.linear([0, 1])
    for method in ("entropy", "decode"):
        compiled = torch.compile(lambda x, name=method: getattr(automaton.paths(x), name)(), backend="eager")
        with pytest.raises(NotImplementedError, match=r"read its arcs: call it outside of torch\.compile"):
            compiled(torch.zeros(2, 2))


@pytest.mark.parametrize("backend", ["native"], indirect=True)
def test_compiles(backend: str) -> None:
    automaton = bx.Automaton([(0, 0, 0), (0, 1, 1), (1, 1, 2), (1, 0, 1), (0, 1, -1)], final={1: 0.0})

    def loss(log_probs: Tensor, scores: Tensor, lengths: Tensor) -> Tensor:
        p = automaton.paths(log_probs, scores=scores, final=torch.zeros(2), lengths=lengths, omega="sparsemax")
        return p.value.sum() + p.expected_path.square().sum()

    tensors, lengths = inputs()[:2], torch.tensor([3, 1])
    eager = loss(*tensors, lengths)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(*tensors, lengths)
    close(compiled, eager)
    for a, b in zip(torch.autograd.grad(compiled, tensors), torch.autograd.grad(eager, tensors), strict=True):
        close(a, b)


# --- edge cases


@every_kernel
def test_no_accepting_path(omega: bx.Regularizer, backend: str) -> None:
    log_probs = potentials(2, 3, 3, seed=1, requires_grad=True)
    p = bx.Automaton.linear([0, 1]).paths(log_probs, lengths=torch.tensor([3, 2]), omega=omega)
    assert p.value[0] == -INF
    assert p.value[1].isfinite()
    gradient = torch.autograd.grad(p.value[1], log_probs, retain_graph=True)[0]
    assert gradient.isfinite().all()
    assert all(g.isfinite().all() for g in p.gradient.values())
    assert not p.expected_path[0].any()
    assert not p.sample((3,))[:, 0].any()
    assert (p.decode()[0] == -1).all()
    assert p.num_paths.tolist() == [0, 1]
    assert p.entropy().tolist() == [0, 0]
    assert p.support_paths()[1].tolist() == [[0, 1]]
    assert (p.outputs(p.decode())[0] == -1).all()
    assert (p.max_marginals[0] == -INF).all()
    assert (p.most_accurate()[0] == -1).all()


@every_kernel
def test_no_frames_and_one_state(omega: bx.Regularizer, backend: str) -> None:
    loop = bx.Automaton([(0, 0, 0)], final={0: 0.25})
    p = loop.paths(torch.zeros(2, 0, 1, dtype=torch.float64), omega=omega)
    close(p.value, [0.25, 0.25])
    assert p.decode().shape == (2, 0)
    assert p.sample((3,)).shape == (3, 2, 0, 1)
    close(p.log_prob(p.decode()), [0.0, 0.0])
    close(p.entropy(), [0.0, 0.0])
    assert p.num_paths.tolist() == [1, 1]
    assert p.expected_path.shape == (2, 0, 1)
    q = loop.paths(torch.ones(3, 1, dtype=torch.float64), omega=omega)
    close(q.value, 3.25)
    close(q.gradient["arcs"], [3.0])
    assert q.decode().tolist() == [0, 0, 0]
    empty = loop.paths(torch.zeros(0, 3, 1), omega=omega)
    assert empty.value.shape == (0,)
    assert empty.gradient["arcs"].tolist() == [0.0]


@every_kernel
def test_an_automaton_without_arcs(omega: bx.Regularizer, backend: str) -> None:
    empty, one = bx.Automaton.linear([]), bx.Automaton.linear([1])
    p = empty.paths(torch.zeros(2, 0, 3), omega=omega)
    close(p.value, [0.0, 0.0])
    assert p.decode().shape == p.outputs(p.decode()).shape == (2, 0)
    q = empty.paths(torch.zeros(2, 2, 3), lengths=[0, 2], omega=omega)
    assert q.value.tolist() == [0.0, -INF]
    assert q.expected_path.count_nonzero() == 0
    assert q.num_paths.tolist() == [1, 0]
    both = bx.Automaton.stack([empty, one]).paths(torch.zeros(2, 1, 3), lengths=[0, 1], omega=omega)
    close(both.value, [0.0, 0.0])
    assert both.decode().tolist() == [[-1], [0]]
    assert bx.Automaton.stack([empty, empty]).paths(torch.zeros(2, 0, 3), omega=omega).value.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("arc", [-2, 1, 2])
def test_labels_and_outputs_need_arcs(arc: int) -> None:
    automata = [bx.Automaton([(0, 1, 0)]), bx.Automaton([(0, 1, 0), (0, 1, 1)])]
    p = bx.Automaton.stack(automata).paths(torch.zeros(2, 1, 2))
    for translate in (p.labels, p.outputs):
        assert translate(torch.tensor([[0], [1]])).tolist() == [[0], [1]]
        with pytest.raises(ValueError, match=rf"^arcs must be paths, such as decode\(\) returns, got the arc {arc}$"):
            translate(torch.tensor([[arc], [0]]))


def test_a_path_without_arcs_can_be_ambiguous() -> None:
    p = bx.Automaton([(0, 1, 0)], start=[0.0, 0.0], final=[0.0, 0.0]).paths(torch.zeros(0, 1))
    assert p.num_paths == 2
    with pytest.raises(ValueError, match="path must have arcs if several states are both start and final"):
        p.log_prob(p.decode())


def test_batches_are_indexed_with_their_automata() -> None:
    automata = [bx.Automaton([(0, 1, 0, 5), (1, 2, 1, -1)]), bx.Automaton([(0, 1, 1, 7), (1, 2, 0, 8), (0, 2, 0, 1)])]
    p = bx.Automaton.stack(automata).paths(potentials(3, 2, 2, 2))
    assert p.batch_shape == (3, 2)
    assert p.outputs(p.decode()).tolist() == [[[5, -1], [7, 8]]] * 3
    assert p[2, 1].outputs(p[2, 1].decode()).tolist() == [7, 8]
    assert p[:, 0].outputs(p[:, 0].decode()).tolist() == [[5, -1]] * 3
    wide = p.expand((4, 3, 2))
    close(wide.value[1], p.value)
    assert wide.outputs(wide.decode()).shape == (4, 3, 2, 2)
    assert p.outputs(p.sample_decoded((6,))).shape == (6, 3, 2, 2)
    half = p.to(torch.float32)
    close(half.value.double(), p.value, 1e-5)
    with pytest.raises(
        ValueError, match=r"log_probs must have shape \(\.\.\., 2, T, V\) for 2 automata, got \(3, 2, 2\)"
    ):
        bx.Automaton.stack(automata).paths(torch.zeros(3, 2, 2))


def test_scores_of_the_automaton_are_learnable() -> None:
    scores = torch.tensor([0.5, -0.5], requires_grad=True)
    p = bx.Automaton([(0, 1, 0), (0, 1, 1)], scores=scores).paths(torch.zeros(2, 1, 2))
    p.value.sum().backward()
    assert scores.grad is not None
    close(scores.grad, 2 * scores.detach().softmax(0), 1e-6)


def test_divergence() -> None:
    automaton = bx.Automaton([(0, 0, 0), (0, 1, 1), (1, 1, 2), (1, 0, 1)], final=[0.0, 0.0])
    p, q = (automaton.paths(potentials(4, 3, seed=n)) for n in (1, 2))
    paths = p.topk_decoded(int(p.num_paths))[1]
    log_p = p.log_prob(paths)
    close(torch.distributions.kl_divergence(p, q), (log_p.exp() * (log_p - q.log_prob(paths))).sum())
    other = bx.Automaton([(0, 0, 0), (0, 1, 1), (1, 1, 2), (1, 0, 0)], final=[0.0, 0.0]).paths(potentials(4, 3))
    with pytest.raises(ValueError, match="paths of the same graph"):
        torch.distributions.kl_divergence(p, other)


# --- errors


def test_errors_of_arguments() -> None:
    automaton = bx.Automaton([(0, 1, 0), (0, 1, 3), (1, 1, 2)], final=[0.0, 0.0])
    zeros = torch.zeros(2, 4, 4)
    for match, call in {
        r"arcs must have labels below 3, the number of classes of log_probs, got label 3 at arc 1": lambda: (
            automaton.paths(zeros[..., :3])
        ),
        r"log_probs must have shape \(\.\.\., T, V\) with V >= 1, got \(4,\)": lambda: automaton.paths(zeros[0, 0]),
        r"scores must have shape \(\.\.\., 3\), got \(2,\)": lambda: automaton.paths(zeros, scores=torch.zeros(2)),
        r"start must have shape \(\.\.\., 2\), got \(3,\)": lambda: automaton.paths(zeros, start=torch.zeros(3)),
        r"final must have shape \(\.\.\., 2\), got \(3,\)": lambda: automaton.paths(zeros, final=torch.zeros(3)),
        r"lengths must be from 0 to 4, got 5 for batch element 1": lambda: automaton.paths(
            zeros, lengths=torch.tensor([4, 5])
        ),
        r"lengths must be from 0 to 4, got -1": lambda: automaton.paths(zeros, lengths=-1),
        r"batch dimensions of tensors and lengths must broadcast": lambda: automaton.paths(
            zeros, lengths=torch.tensor([4, 1, 2])
        ),
        r"log_probs must be finite or -inf, got nan at event index \(1, 0\) of batch element 0": lambda: (
            automaton.paths(zeros.index_fill(1, torch.tensor(1), math.nan)).value
        ),
        r"arcs must be finite or -inf, got nan": lambda: (
            automaton.paths(zeros, scores=torch.full((3,), math.nan)).value
        ),
        r"omega must not charge for a state .* the value would depend on how the graph is written": lambda: (
            automaton.paths(zeros, omega="l2")
        ),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()


def test_a_python_omega_that_charges_for_a_choice_of_one_is_refused() -> None:
    class Costly(bx.Tsallis):
        def penalty(self, q: Tensor) -> Tensor:
            return super().penalty(q) + 1

    with pytest.raises(ValueError, match="as Costly does"):
        bx.Automaton.linear([0]).paths(torch.zeros(1, 1), omega=Costly(2.0))


@pytest.mark.parametrize(
    ("arcs", "match"),
    [
        ([0, 9, 1], r"path\[1\] must be the number of an arc, from 0 to 3, got 9"),
        ([0, 0, 1], r"path\[1\] is an arc from 'a', but the arc before it leads to 'b'"),
        ([0, -1, 1], r"path\[1\] is padding, but another arc follows it"),
        ([0, 1], r"path must have one arc with a label for each of 3 frames, got 2"),
        ([1, 1, 1], r"path\[0\] is an arc from 'b', which is not a start state"),
        ([2, 2, 2], r"path\[2\] is an arc to 'a', which is not a final state"),
    ],
)
def test_errors_of_decoded_paths(arcs: list[int], match: str) -> None:
    automaton = bx.Automaton([("a", "b", 0), ("b", "b", 1), ("a", "a", 0), ("b", "a", 1)], final={"b": 0.0})
    p = automaton.paths(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=match):
        p.log_prob(torch.tensor(arcs))
    with pytest.raises(ValueError, match=r"path must hold arcs, such as p\.decode"):
        p.log_prob(p.best_path())


# --- losses


def lf_mmi(log_probs: Tensor, denominator: bx.Automaton, numerators: Any, lengths: Tensor) -> Tensor:
    """The loss of lattice-free MMI: the log-probability of the transcripts among all that the denominator accepts."""
    every, own = (a.paths(log_probs, lengths=lengths) for a in (denominator, numerators))
    loss: Tensor = every.value - own.value
    return loss


@every_kernel
def test_losses_take_arcs_and_labels(omega: bx.Regularizer, backend: str) -> None:
    p = one(omega, 2, seed=7).p
    p = p[p.value > -INF]
    arcs = p.decode()
    paths = p.encode(arcs)
    loss = bx.losses.surrogate(p, arcs, reduction="none")
    assert (loss >= -1e-9).all()
    close(loss, p.value - (paths * p.log_probs.masked_fill(paths == 0, 0)).flatten(1).sum(-1) - rest_of(p, arcs))
    by_labels = bx.losses.surrogate(p, paths, reduction="none")
    assert (by_labels <= loss + 1e-9).all()  # other paths may have the same labels
    close(bx.losses.structured_perceptron(p, arcs), 0.0)
    assert bx.losses.structured_hinge(p, arcs) >= -1e-9
    bx.losses.relaxed(p, arcs)
    bx.losses.relaxed(p, paths)
    nll = bx.losses.path_nll(p, arcs, reduction="none")
    close(nll, -p.log_prob(arcs))
    close(bx.losses.crf_nll(p, torch.ones_like(paths, dtype=torch.bool)), 0.0)
    close(
        bx.losses.expected_cost(p, bx.losses.hamming_cost(p, arcs), reduction="none"),
        p.lengths - (p.expected_path * paths).flatten(1).sum(-1),
    )
    risk = bx.losses.risk(p, lambda a: (p.labels(a) == 0).sum(-1).double(), topk=1, reduction="none")
    assert risk.isfinite().all()
    with pytest.raises(ValueError, match=r"target\[1\] is an arc from"):
        bx.losses.surrogate(p[0], arcs[0].where(arcs[0] < 0, 0))
    with pytest.raises(ValueError, match=r"target\[0\] allows no path of finite score"):
        bx.losses.surrogate(p, torch.zeros_like(paths))


def rest_of(p: Any, arcs: Tensor) -> Tensor:
    """The scores of arcs, and of the first and the last state."""
    table, total = p.automaton.arcs, []
    for row in arcs:
        path = row[row >= 0]
        first, last = table[path[0], 0], table[path[-1], 1]
        total.append(p.scores["arcs"][path].sum() + p.scores["start"][first] + p.scores["final"][last])
    return torch.stack(total)


def test_lf_mmi(backend: str) -> None:
    transcripts = [[1, 2], [2], [1, 1]]
    lengths = torch.tensor([5, 4, 3])
    logits = potentials(3, 5, CLASSES, seed=3, requires_grad=True)
    log_probs = logits.log_softmax(-1)
    loss = lf_mmi(
        log_probs,
        bx.Automaton.ctc(vocab=CLASSES),
        bx.Automaton.stack([bx.Automaton.ctc(target) for target in transcripts]),
        lengths,
    )
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(target) for target in transcripts], True)
    labels = torch.tensor([len(target) for target in transcripts])
    ctc = torch.nn.functional.ctc_loss(log_probs.movedim(1, 0), padded, lengths, labels, reduction="none")
    close(loss, ctc)  # all outputs are possible, so the denominator is 1
    gradients = [torch.autograd.grad(value.sum(), logits, retain_graph=True)[0] for value in (loss, ctc)]
    close(*gradients)
    some = bx.Automaton.ctc(transcripts[0])
    among = lf_mmi(log_probs[:1], some, bx.Automaton.stack([some]), lengths[:1])
    close(among, [0.0])


def test_all_label_sequences_are_the_paths_of_the_ctc_topology() -> None:
    p = bx.Automaton.ctc(vocab=2).paths(potentials(3, 2))
    every = torch.tensor(list(itertools.product(range(2), repeat=3)))
    got = p.labels(p.topk_decoded(8)[1])
    assert sorted(got.tolist()) == every.tolist()


def test_repr() -> None:
    p = bx.Automaton([(0, 1, 0)]).paths(torch.zeros(2, 1, 1))
    shown = (
        "AutomatonPaths(batch_shape=(2,), event_shape=(1, 1), num_states=2, num_arcs=1, omega=Negentropy(gamma=1.0))"
    )
    assert repr(p) == shown
