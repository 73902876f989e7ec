// The sweeps over automata (Algorithms 1 and 2 of the paper) under any Ω. They compute in double.
#include "automaton.h"

#include <atomic>

#include "exp.h"
#include "paths.h"
#include "sweep.h"

namespace bellmax::BELLMAX_ARCH {
namespace {

using namespace automata;

// body(sweep) for groups of these members.
template <class S, class Body>
void for_sweeps(const AutomatonProblem<S>& problem, const std::vector<int64_t>& members, Body body) {
    const std::unique_ptr<node::Kernels> omega = node::kernels(problem.omega, sizeof(S) == 4);
    for_groups(problem, members, false, [&](const Members<S>& group) {
        Sweep<S> sweep(group, *omega);
        body(sweep);
    });
}

bool are_zero(const double* numbers) { return !any(load(numbers) != V{}); }

template <class S>
void store_frame(const Members<S>& group, int64_t t, const double* value, const double* threshold) {
    if (!group.problem.tape || t % group.problem.frames_per_row) return;
    group.store_row(t, 0, value);
    if (keeps_thresholds(group.problem.omega)) group.store_row(t, 1, threshold);
    group.store_scale(t, 0, V{});
    group.store_scale(t, 1, V{} + in_log_space);
}

template <class S>
bool forward_in_log_space(const AutomatonProblem<S>& problem, const std::vector<int64_t>& members, S* value) {
    std::atomic<bool> all_good{true};
    for_sweeps(problem, members, [&](Sweep<S>& sweep) {
        const Members<S>& group = sweep.group;
        const int64_t size = group.plan.states * lanes;
        const Array<double> numbers = scratch<double>(3 * size);
        double *before = numbers.get(), *here = before + size, *const threshold = here + size;
        bool good = true;
        for (int64_t t = 0; t <= group.longest; ++t) {
            good &= sweep.solve_frame(t, before, here, threshold);
            store_frame(group, t, here, threshold);
            if (group.ends_at(t)) {
                double end[lanes], unused[lanes];
                good &= sweep.omega.solve(sweep.gather_end(t, sweep.theta, here, no_score, sweep.x.get()),
                                          sweep.x.get(), end, unused);
                for (int l = 0; l < group.members; ++l) {
                    if (group.length[l] != t) continue;
                    S& own = value[group.b[l]];
                    own = S(end[l] / sweep.omega.unit);
                    good &= own < infinity<S>;
                }
            }
            std::swap(before, here);
        }
        if (!good) all_good = false;
    });
    return all_good;
}

template <class S>
bool forward(const AutomatonProblem<S>& problem, S* value) {
    std::vector<int64_t> members = all_members(problem);
    bool good = true;
    if (problem.omega.is_sum) members = forward_in_exp_space(problem, value, good);
    return good && forward_in_log_space(problem, members, value);
}

// Members whose tape is in log space, or those whose tape is in exp space.
template <class S>
std::vector<int64_t> members_by_tape(const AutomatonProblem<S>& problem, bool in_log) {
    std::vector<int64_t> members;
    for (int64_t b = 0; b < problem.batch; ++b) {
        const bool is_log = !problem.omega.is_sum || scale_of(problem, problem.row(b, 0), 1) == in_log_space;
        if (is_log == in_log) members.push_back(b);
    }
    return members;
}

template <class S>
V seeds(const Members<S>& group, const S* seed) {
    V v{};
    for (int l = 0; l < group.members; ++l) v[l] = double(seed[group.b[l]]);
    return v;
}

// A number for each state of two frames, of which the sum over paths goes from one to the other.
class Flow {
    const int64_t size;
    const Array<double> numbers;

public:
    double *here, *before;

    explicit Flow(int64_t states)
        : size(states * lanes), numbers(zeros<double>(2 * size)), here(numbers.get()), before(here + size) {}
    void next() {
        std::swap(here, before);
        std::fill_n(before, size, 0.0);
    }
};

template <class S>
void backward(const AutomatonProblem<S>& problem, const S* seed, const AutomatonArrays<S>& gradients) {
    backward_in_exp_space(problem, members_by_tape(problem, false), seed, gradients);
    for_sweeps(problem, members_by_tape(problem, true), [&](Sweep<S>& sweep) {
        const Members<S>& group = sweep.group;
        const Plan& plan = group.plan;
        const Terms sums = group.zero_terms();
        Flow mass(plan.states);
        const V one = V{} + 1, own_seeds = seeds(group, seed);
        const auto back = [&](int64_t t, int64_t first) {
            double* const q = sweep.q.get();
            double share[lanes], own[lanes];
            std::fill_n(sums.frame.get(), plan.labels * lanes, 0.0);
            if (t > 0) sweep.read_frame(t);
            if (group.ends_at(t)) {
                store(own, own_seeds);
                node::shares(sweep.weigh_end(t, first, false), q, own, share);
                sweep.spread_end(q, load(share), mass.here, &sums);
            }
            for (int64_t p = plan.states - 1; p >= 0; --p) {
                const double* const mass_of_node = mass.here + p * lanes;
                if (are_zero(mass_of_node)) continue;
                sweep.spend(sweep.edges_of(t, p) * lanes);
                node::shares(sweep.weigh(t, p, first, false), q, mass_of_node, share);
                sweep.spread(t, p, q, load(share), mass.before, mass.here, &sums);
            }
            if (t > 0) group.write_frame(sums.frame.get(), t - 1, one, gradients);
            mass.next();
        };
        sweep.down([&](int64_t first, int64_t last) {
            for (int64_t t = last; t > first; --t) back(t, first);
            if (first == 0) back(0, 0);
        });
        group.write(sums, one, gradients);
    });
}

// Along a direction, for each node its value's change and its mean (node.h): of the frames of a block, and the changes
// of the first frame of each block.
template <class S>
class Tangent {
    Sweep<S>& sweep;
    const AutomatonArrays<const S>& direction;
    const Plan& plan = sweep.plan;
    const FrameNumbers saved{plan.states, sweep.group.longest / sweep.stride + 1};
    const FrameNumbers changes{plan.states, sweep.stride + 1}, means{plan.states, sweep.stride + 1};

public:
    const Terms z;

    Tangent(Sweep<S>& own, const AutomatonArrays<const S>& along)
        : sweep(own), direction(along), z(own.group.read(along, 1, 0)) {
        sweep.up([&](int64_t first, int64_t last) {
            if (first == 0) {
                change(0, 0);
                save(0, 0);
            }
            load(first);
            for (int64_t t = first + 1; t <= last; ++t) change(t, first);
            if (last == first + sweep.stride) save(last, first);
        });
    }

    // Computes the numbers of a block.
    void visit(int64_t first, int64_t last) {
        if (first == 0) change(0, 0);
        load(first);
        for (int64_t t = first + 1; t <= last; ++t) change(t, first);
    }
    void read_frame(int64_t t) { sweep.group.read_frame(direction, t - 1, 1, 0, z.frame.get()); }
    // y of the edges into a node.
    void gather(int64_t t, int64_t p, int64_t first) const {
        const int64_t n = t - first;
        sweep.gather(t, p, z, n > 0 ? changes.at(n - 1) : nullptr, changes.at(n), sweep.y.get());
    }
    void gather_end(int64_t t, int64_t first) const {
        sweep.gather_end(t, z, changes.at(t - first), 0, sweep.y.get());
    }
    const double* mean(int64_t t, int64_t p, int64_t first) const { return means.at(t - first) + p * lanes; }

private:
    void save(int64_t t, int64_t first) {
        std::copy_n(changes.at(t - first), changes.size, saved.at(t / sweep.stride));
    }
    void load(int64_t first) { std::copy_n(saved.at(first / sweep.stride), changes.size, changes.at(0)); }
    void change(int64_t t, int64_t first) {
        if (t > 0) {
            sweep.read_frame(t);
            read_frame(t);
        }
        sweep.spend(plan.edges * lanes);
        for (int64_t p = 0; p < plan.states; ++p) {
            const node::Matrix of = sweep.weigh(t, p, first, true);
            gather(t, p, first);
            node::change(of, sweep.q.get(), sweep.s.get(), sweep.y.get(), changes.at(t - first) + p * lanes,
                         means.at(t - first) + p * lanes);
        }
    }
};

template <class S>
void hessian(const AutomatonProblem<S>& problem, const S* seed, const AutomatonArrays<const S>& z,
             const AutomatonArrays<S>& products) {
    hessian_in_exp_space(problem, members_by_tape(problem, false), seed, z, products);
    for_sweeps(problem, members_by_tape(problem, true), [&](Sweep<S>& sweep) {
        const Members<S>& group = sweep.group;
        const Plan& plan = group.plan;
        Tangent<S> tangent(sweep, z);
        const Terms sums = group.zero_terms();
        Flow mass(plan.states), change(plan.states);  // the change of the mass that `backward` has
        const V one = V{} + 1, own_seeds = seeds(group, seed);
        double *const q = sweep.q.get(), *const s = sweep.s.get(), *const y = sweep.y.get(), *const e = sweep.e.get();
        const auto back = [&](int64_t t, int64_t first) {
            double share[lanes], own[lanes], unused[lanes], mean[lanes];
            std::fill_n(sums.frame.get(), plan.labels * lanes, 0.0);
            if (t > 0) {
                sweep.read_frame(t);
                tangent.read_frame(t);
            }
            if (group.ends_at(t)) {
                const node::Matrix of = sweep.weigh_end(t, first, true);
                store(own, own_seeds);
                tangent.gather_end(t, first);
                node::change(of, q, s, y, unused, mean);
                node::along(of, s, y, mean, own, e);
                sweep.spread_end(e, one, change.here, &sums);
                node::shares(of, q, own, share);
                sweep.spread_end(q, load(share), mass.here, nullptr);
            }
            for (int64_t p = plan.states - 1; p >= 0; --p) {
                const double *const own_mass = mass.here + p * lanes, *const own_change = change.here + p * lanes;
                if (are_zero(own_mass) && are_zero(own_change)) continue;
                sweep.spend(sweep.edges_of(t, p) * lanes);
                const node::Matrix of = sweep.weigh(t, p, first, true);
                tangent.gather(t, p, first);
                node::along(of, s, y, tangent.mean(t, p, first), own_mass, e);
                node::share(of, q, own_change, true, e);
                sweep.spread(t, p, e, one, change.before, change.here, &sums);
                node::shares(of, q, own_mass, share);
                sweep.spread(t, p, q, load(share), mass.before, mass.here, nullptr);
            }
            if (t > 0) group.write_frame(sums.frame.get(), t - 1, one, products);
            mass.next();
            change.next();
        };
        sweep.down([&](int64_t first, int64_t last) {
            tangent.visit(first, last);
            for (int64_t t = last; t > first; --t) back(t, first);
            if (first == 0) back(0, 0);
        });
        group.write(sums, one, products);
    });
}

template <class S>
void sample(const AutomatonProblem<S>& problem, int64_t draws, int64_t choices, const double* uniforms,
            int64_t longest, int64_t* paths) {
    for_sweeps(problem, all_members(problem), [&](Sweep<S>& sweep) {
        draw_paths(sweep, draws, choices, uniforms, longest, paths);
    });
}

}  // namespace

template <class S>
AutomatonKernels<S> automaton_kernels() {
    return {forward<S>, backward<S>, hessian<S>, sample<S>, best_paths<S>};
}
template AutomatonKernels<float> automaton_kernels<float>();
template AutomatonKernels<double> automaton_kernels<double>();

}  // namespace bellmax::BELLMAX_ARCH
