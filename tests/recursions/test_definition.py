"""The decorator and the call: axes, shapes, static arguments, the cache, and torch's ways of running code."""

from __future__ import annotations

import math
import pickle
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.inside import cache_of

import bellmax as bx

ROOM = 9


@bx.program("item")
def knapsack(value, *, sizes, room):
    best = [0.0] * (room + 1)
    for i, size in enumerate(sizes):
        best = [bx.max(best[r], best[r - size] + value[i]) if r >= size else best[r] for r in range(room + 1)]
    return best[room]


@bx.program("i j, j, ")
def assign(score, bonus, penalty):
    """Choose one column for each row, where neighbors pay a penalty for equal columns."""
    rows, columns = score.shape
    best = [score[0, j] + bonus[j] for j in range(columns)]
    for i in range(1, rows):
        best = [
            score[i, j] + bonus[j] + bx.max(best[k] - penalty if j == k else best[k] for k in range(columns))
            for j in range(columns)
        ]
    return bx.max(best)


VALUES = torch.tensor([2.0, 3.0, 1.0, 4.0], dtype=torch.float64)
SIZES = (3, 4, 2, 5)


def solve(values, **options):
    return knapsack(values, sizes=SIZES, room=ROOM, **options)


# --- the decorator


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bx.program(solve), r'write @bx.program\("item"\)'),
        (lambda: bx.program(3), "axes must be a string"),
        (lambda: bx.program("i-j"), "names of dimensions"),
        (lambda: bx.program("i", max_edges=0), "max_edges must be a positive integer, got 0"),
        (lambda: bx.program("i")(3), "must decorate a function, got 3"),
        (lambda: bx.program("i")(lambda *v: v), r"got \*args"),
        (lambda: bx.program("i")(lambda self, value: value), "is a method: define it outside of the class"),
        (lambda: bx.program("i, j")(lambda value: value), "got 2 parts and the positional arguments value"),
        (lambda: bx.program("i")(lambda value, omega: value), "must not have an argument 'omega'"),
    ],
)
def test_wrong_decorations(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_repr_and_names():
    assert repr(knapsack) == "<bellmax.program knapsack(value[item])>"
    assert repr(assign) == "<bellmax.program assign(score[i, j], bonus[j], penalty[])>"
    assert assign.__doc__.startswith("Choose one column")
    assert knapsack.function(VALUES.numpy(), sizes=SIZES, room=ROOM) == 7.0
    shown = repr(solve(VALUES))
    assert "knapsack" in shown
    assert "nodes=11, edges=22, inputs: value (4,)" in shown


# --- the call


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: knapsack(VALUES, VALUES, sizes=SIZES, room=ROOM),
            r"takes 1 score tensor \(value\), got 2 .* by keyword",
        ),
        (lambda: knapsack(value=VALUES, sizes=SIZES, room=ROOM), "got 0 positional arguments: pass scores by position"),
        (lambda: knapsack(VALUES, sizes=tuple(torch.arange(4)), room=3), "got a Tensor in a tuple: pass a tuple of"),
        (lambda: knapsack(VALUES, sizes=((1,), [2]), room=3), "sizes must be hashable, got a list in a tuple"),
        (lambda: solve(3.0), "value must be a tensor, got float"),
        (lambda: solve(torch.tensor(3.0)), r"value must have shape \(..., item\), got \(\)"),
        (lambda: solve(torch.arange(4)), "value must be floating point, got dtype torch.int64"),
        (lambda: knapsack(VALUES, sizes=[1, 2], room=3), "sizes must be hashable, got a list: pass a tuple"),
        (lambda: knapsack(VALUES, sizes=torch.arange(3), room=3), "sizes must be hashable, got a Tensor"),
        (lambda: knapsack(VALUES, sizes=VALUES.numpy(), room=3), "sizes must be hashable, got a ndarray"),
        (lambda: assign(torch.zeros(2, 3), torch.zeros(4), torch.tensor(0.0)), "'j' must have the same size, got 3 of"),
        (lambda: assign(torch.zeros(5, 2, 3), torch.zeros(2, 3), torch.tensor(0.0)), "batch dimensions .* broadcast"),
        (lambda: solve(VALUES, omega="soft"), "omega must be"),
        (lambda: solve(VALUES, gamma=-1.0), "gamma must be"),
        (lambda: knapsack.graph(sizes=SIZES, room=ROOM), "got 0 shapes"),
        (lambda: knapsack.graph(4, sizes=SIZES, room=ROOM), r"must have the dimensions \(item\), got 4"),
        (lambda: knapsack.graph((4.5,), sizes=SIZES, room=ROOM), r"must have the dimensions \(item\), got \(4.5,\)"),
        (lambda: knapsack.graph((-1,), sizes=SIZES, room=ROOM), r"must have the dimensions \(item\), got \(-1,\)"),
        (
            lambda: knapsack.graph((4, 2), sizes=SIZES, room=ROOM),
            r"must have the dimensions \(item\), got \(4, 2\)",
        ),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_missing_keyword_argument_is_the_usual_error_of_python():
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'room'"):
        knapsack(VALUES, sizes=SIZES)


def test_a_program_inside_a_program_is_refused_and_its_function_is_not():
    with pytest.raises(ValueError, match=r"a program cannot call another program: call knapsack.function"):
        bx.program("item")(lambda value: knapsack(value, sizes=SIZES, room=ROOM))(VALUES)
    outer = bx.program("item")(lambda value: knapsack.function(value, sizes=SIZES, room=ROOM) + value[0])
    assert torch.allclose(outer(VALUES).value, solve(VALUES).value + VALUES[0])


@pytest.mark.parametrize("batch", [(), (3,), (2, 1, 3), (0,)])
def test_batches_of_any_shape_equal_their_members(batch, omega):
    generator = torch.Generator().manual_seed(0)
    score = torch.randn(*batch, 3, 2, generator=generator, dtype=torch.float64)
    bonus, penalty = torch.tensor([0.3, -0.2], dtype=torch.float64), torch.randn(batch, dtype=torch.float64)
    p = assign(score, bonus, penalty, omega=omega)
    assert p.value.shape == p.batch_shape == batch
    assert p.expected_path.shape == (*batch, 3, 2)
    assert p.gradient["bonus"].shape == (2,)
    for index in torch.ones(batch).nonzero().tolist():
        index = tuple(index)
        alone = assign(score[index], bonus, penalty[index], omega=omega)
        assert torch.allclose(p.value[index], alone.value)
        assert torch.allclose(p.expected_path[index], alone.expected_path)


def test_scores_without_batch_are_shared_and_scores_broadcast():
    score, bonus = torch.randn(4, 1, 3, 2, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    penalty = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    p = assign(score, bonus, penalty)
    assert p.batch_shape == (4, 5)
    assert torch.allclose(p[2, 3].value, assign(score[2, 0], bonus[3], penalty).value)
    (shared,) = torch.autograd.grad(p.value.sum(), penalty)
    each = torch.stack([assign(score[a, 0], bonus[b], penalty).value for a in range(4) for b in range(5)]).sum()
    assert torch.allclose(shared, torch.autograd.grad(each, penalty)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_and_constants_in_half_precision(dtype):
    p = bx.program("i")(lambda value: bx.max(value[0] + 0.1, value[1] + 1000.1))
    q = p(torch.zeros(2, dtype=dtype), omega="hard")
    assert q.value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(q.value, torch.tensor(1000.1, dtype=q.value.dtype))  # 1000.1 is 1000 in bfloat16
    assert q.expected_path.dtype == dtype


def test_tensor_gamma_scales_constants_as_well():
    gamma = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    program = bx.program("i")(lambda value: bx.max(value[0] + 0.7, 2 * value[1] - 0.2))
    values = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    expected = gamma * torch.stack(((values[:, 0] + 0.7) / gamma, (2 * values[:, 1] - 0.2) / gamma)).logsumexp(0)
    assert torch.allclose(program(values, gamma=gamma).value, expected)
    assert torch.autograd.gradcheck(lambda v, g: program(v, gamma=g).value, (values, gamma))
    assert torch.autograd.gradgradcheck(lambda v, g: program(v, gamma=g).value, (values, gamma))


# --- the cache


def test_the_function_runs_once_for_each_combination_of_shapes_and_options():
    calls = []

    @bx.program("item")
    def counted(value, *, offset=0.0):
        calls.append(offset)
        return bx.max(value) + offset

    for _ in range(3):
        counted(torch.zeros(5, 2))
        counted(torch.zeros(2), omega="entmax", gamma=0.5)
    assert calls == [0.0]
    counted(torch.zeros(3))
    counted(torch.zeros(2), offset=1.0)
    assert calls == [0.0, 0.0, 1.0]
    counted.clear_cache()
    counted(torch.zeros(2))
    assert len(calls) == 4


OFFSET = 1.0


def test_numbers_that_the_function_captures_are_part_of_the_key(monkeypatch):
    weight = 1.0

    @bx.program("item")
    def shifted(value):
        return bx.max(value) + weight + OFFSET

    assert shifted(torch.zeros(1)).value == 2
    weight = 5.0
    assert shifted(torch.zeros(1)).value == 6
    monkeypatch.setitem(globals(), "OFFSET", 3.0)
    assert shifted(torch.zeros(1)).value == 8


def test_equal_keyword_arguments_of_different_types_are_different():
    calls = []

    @bx.program("item")
    def kind(value, *, x):
        calls.append(x)
        return value[0] + len(type(x[-1] if isinstance(x, tuple) else x).__name__)

    for x in (1, 1.0, True, (0, 1), (0, 1.0), (0, True)):
        name = type(x[-1] if isinstance(x, tuple) else x).__name__
        assert kind(torch.zeros(1), x=x).value == len(name), x
    kind(torch.zeros(1), x=(0, 1.0))
    assert len(calls) == 6


def _pair(value):
    return bx.max(value[:2])


COUNT, NESTED = np.int64(2), (1, [2])


def test_functions_and_numbers_of_numpy_that_the_function_captures_are_part_of_the_key(monkeypatch):
    @bx.program("item")
    def paths(value):
        return bx.max(_pair(value), *value[:COUNT])

    assert paths(torch.zeros(4)).num_paths == 4
    monkeypatch.setitem(globals(), "COUNT", np.int64(3))
    assert paths(torch.zeros(4)).num_paths == 5
    monkeypatch.setitem(globals(), "_pair", lambda value: bx.max(value))
    assert paths(torch.zeros(4)).num_paths == 7


def test_another_object_in_a_captured_variable_is_noticed(monkeypatch):
    table = [1.0]

    @bx.program("item")
    def shifted(value):
        return bx.max(value) + table[0] + NESTED[1][0]

    def value():
        return shifted(torch.zeros(1)).value

    assert value() == 3
    table = [2.0]
    assert value() == 4
    monkeypatch.setitem(globals(), "NESTED", (1, [5]))
    assert value() == 7
    table[0] = 9.0
    assert value() == 7  # a change of the content is not noticed


def test_a_program_can_capture_a_tuple_of_lists():
    assert bx.program("item")(lambda value: value[NESTED[0]] + NESTED[1][0])(torch.zeros(2)).value == 2


def test_an_interrupted_trace_is_not_cached():
    interrupts = [True]

    @bx.program("item")
    def best(value):
        result = bx.max(value[:2])
        if interrupts and interrupts.pop():
            raise KeyboardInterrupt
        return bx.max(result, *value[2:])

    with pytest.raises(KeyboardInterrupt):
        best(torch.zeros(4))
    assert bx.max(1.0, 2.0) == 2.0
    assert best(torch.zeros(4)).num_paths == 4


def test_old_traces_are_dropped_if_all_traces_are_too_large():
    calls = []

    @bx.program("item", max_edges=10)
    def best(value):
        calls.append(len(value))
        return bx.max(value)

    for size in (4, 5, 6, 6, 4):
        best(torch.zeros(size))
    assert calls == [4, 5, 6, 4]


def test_another_thread_may_trace_while_old_traces_are_dropped():
    program = bx.program("item", max_edges=9)(lambda value: bx.max(value))

    class Old:
        """A trace that another thread follows by a new one."""

        @property
        def hypergraph(self):
            cache_of(program).setdefault("new", (self, []))
            return SimpleNamespace(num_edges=9)

    cache_of(program)["old"] = Old(), []
    assert program.graph((3,)).num_edges == 3
    assert "old" not in cache_of(program)


def test_two_threads_trace_at_the_same_time():
    results = {}

    def work(size):
        program = bx.program("item")(lambda value: bx.max(value))
        results[size] = [float(program(torch.zeros(n)).num_paths) for n in range(1, size)]

    threads = [threading.Thread(target=work, args=(size,)) for size in (20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {size: list(map(float, range(1, size))) for size in (20, 30)}


def test_programs_and_distributions_can_be_pickled():
    assert pickle.loads(pickle.dumps(knapsack)) is knapsack
    p = solve(VALUES)
    q = pickle.loads(pickle.dumps(p))
    assert q.value == p.value
    assert q.derivation_edges(q.decode()) == p.derivation_edges(p.decode())


def test_graph_returns_the_hypergraph_of_the_program():
    graph = knapsack.graph((4,), sizes=SIZES, room=ROOM)
    assert (graph.num_nodes, graph.num_edges, graph.num_weights) == (11, 22, 5)
    assert graph is solve(VALUES).hypergraph


# --- torch


def test_compiled_programs_equal_eager_ones_without_a_graph_break():
    values = torch.randn(3, 4, requires_grad=True)

    def loss(v):
        p = solve(v, omega="sparsemax")
        return p.value.sum() + (p.expected_path * v).sum()

    expected = loss(values)  # traces the program
    compiled = torch.compile(loss, fullgraph=True)(values)
    assert torch.allclose(compiled, expected)
    assert torch.allclose(torch.autograd.grad(compiled, values)[0], torch.autograd.grad(expected, values)[0], atol=1e-6)


def test_compiled_programs_with_several_scores_and_constants():
    generator = torch.Generator().manual_seed(2)
    score, bonus = torch.randn(4, 3, 2, generator=generator), torch.randn(4, 2, generator=generator)
    shifted = bx.program("i j, j, ")(lambda s, b, c: assign.function(s, b, c) + 0.7)
    inputs = [x.requires_grad_() for x in (score, bonus, torch.tensor(0.5))]

    def loss(*scores):
        p = shifted(*scores, omega="entmax")
        return p.value.sum() + sum((g * g).sum() for g in p.gradient.values()) + p.max_marginals.sum()

    expected = loss(*inputs)
    compiled = torch.compile(loss, fullgraph=True)(*inputs)
    assert torch.allclose(compiled, expected)
    gradients = [torch.autograd.grad(result, inputs) for result in (compiled, expected)]
    assert all(torch.allclose(own, wanted, atol=1e-6) for own, wanted in zip(*gradients, strict=True))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch, after a graph break
def test_programs_that_were_not_called_before_compilation():
    @bx.program("step")
    def rise(value):
        best = value[0]
        for v in value[1:]:
            best = bx.max(best, best + v)
        return best

    def value(v):
        return rise(v).value

    with pytest.raises(RuntimeError, match="call the program once with these shapes and options before"):
        torch.compile(value, fullgraph=True)(torch.ones(3))
    compiled = torch.compile(value)
    for size in (3, 4, 5):
        assert torch.allclose(compiled(torch.ones(size)), value(torch.ones(size)))


def test_torch_func_and_forward_mode():
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(4, generator=generator, dtype=torch.float64)
    batch = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    value = lambda v: solve(v).value  # noqa: E731
    assert torch.allclose(torch.func.vmap(value)(batch), value(batch))
    assert torch.allclose(torch.func.grad(value)(values), solve(values).expected_path)
    hessian = torch.func.hessian(value)(values)
    z = torch.randn(4, generator=generator, dtype=torch.float64)
    assert torch.allclose(hessian @ z, solve(values).hessian_product(z))
    assert torch.allclose(torch.func.jvp(value, (values,), (z,))[1], solve(values).directional_derivative(z))
    assert torch.allclose(torch.func.jacfwd(value)(values), solve(values).expected_path)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*jit.trace:DeprecationWarning")
def test_jit_trace_of_a_program_that_was_called_before():
    value = lambda v: solve(v).value  # noqa: E731
    expected = value(VALUES)
    assert torch.allclose(torch.jit.trace(value, (torch.zeros_like(VALUES),))(VALUES), expected)


@pytest.mark.parametrize(
    "run",
    [
        lambda value: torch.func.jvp(value, (torch.zeros(2),), (torch.ones(2),))[0],
        lambda value: torch.func.grad(lambda v: value(v))(torch.zeros(2)).sum() * math.log(2),
        lambda value: torch.func.vmap(value)(torch.zeros(3, 2))[0],
    ],
)
def test_the_first_call_may_be_inside_of_a_transform(run):
    program = bx.program("i")(lambda value: bx.max(value[0], value[1] + 0.0))
    value = lambda v: program(v).value  # noqa: E731
    for _ in range(2):
        assert torch.allclose(run(value), torch.tensor(math.log(2)))
    assert torch.allclose(value(torch.zeros(2)), torch.tensor(math.log(2)))


def test_devices_without_kernels_and_meta_tensors():
    assert solve(torch.zeros(2, 4, device="meta")).value.shape == (2,)
    with bx.use_backend("reference"):
        assert torch.allclose(solve(VALUES).value, torch.tensor(7.7668, dtype=torch.float64), atol=1e-4)
