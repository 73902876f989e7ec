// The sweeps of a DAG (Algorithms 1 and 2 of the paper). W sequences of the batch go through the graph side by side,
// one per lane; threads take different sequences. Node quantities are double throughout: a float value of a long path
// has lost the digits that its neighbours' differences need.
#include "dag.h"

#include <atomic>
#include <cstring>
#include <type_traits>

#include "parallel.h"

namespace bellmax::BELLMAX_ARCH {
namespace {

using std::int64_t;

constexpr int lanes = 8;

// W rows of a (batch, columns) array from row `first` on. Lanes past the batch repeat its last row and are not written.
template <class T, int W>
struct Rows {
    T* row[W];
    int valid;

    Rows(T* data, int64_t columns, int64_t batch, int64_t first) {
        valid = static_cast<int>(batch - first < W ? batch - first : W);
        for (int l = 0; l < W; ++l) row[l] = data + columns * (first + (l < valid ? l : valid - 1));
    }

    template <class V>
    void read(int64_t column, V* out) const {
        for (int l = 0; l < W; ++l) out[l] = V(row[l][column]);
    }

    template <class V>
    void write(int64_t column, const V* in) const {
        for (int l = 0; l < valid; ++l) row[l][column] = T(in[l]);
    }
};

// A block of W rows for the sweeps after the first: values and thresholds by node, side by side.
template <class S, class Omega, int W>
struct Block {
    using Real = typename Omega::Real;

    const Graph& graph;
    Omega omega;
    Rows<const S, W> theta;
    std::unique_ptr<double[]> value, threshold;  // by node
    // By edge into the node that was related or weighed last: the score, the score less the greatest, q and s.
    std::unique_ptr<double[]> x;
    std::unique_ptr<Real[]> r;
    std::unique_ptr<double[]> q, s;

    Block(const Problem<S>& problem, int64_t first)
        : graph(problem.graph),
          omega(problem.omega),
          theta(problem.theta, graph.num_edges, problem.batch, first),
          value(scratch<double>(graph.num_nodes * W)),
          threshold(scratch<double>(graph.num_nodes * W)),
          x(scratch<double>(graph.max_parents * W)),
          r(scratch<Real>(graph.max_parents * W)),
          q(scratch<double>(graph.max_parents * W)),
          s(scratch<double>(graph.max_parents * W)) {}

    void read_tape(const Problem<S>& problem, int64_t first) {
        const Rows<const double, W> tape(problem.tape, graph.num_nodes * 2, problem.batch, first);
        for (int64_t i = 0; i < graph.num_nodes; ++i) {
            tape.read(i, &value[i * W]);
            tape.read(i + graph.num_nodes, &threshold[i * W]);
        }
    }

    // Scores θ + v of the edges into node i and their greatest; r, but for the hard max, which needs none.
    void score(int64_t i, double* top) {
        const int64_t begin = graph.offset[i], d = graph.offset[i + 1] - begin;
        for (int l = 0; l < W; ++l) top[l] = -infinity<double>;
        for (int64_t k = 0; k < d; ++k) {
            S weight[W];
            theta.read(graph.edge[begin + k], weight);
            const double* from = &value[graph.parent[begin + k] * W];
#pragma omp simd
            for (int l = 0; l < W; ++l) {
                const double sum = double(weight[l]) + from[l];
                x[k * W + l] = sum;
                top[l] = sum > top[l] ? sum : top[l];
            }
        }
        double base[W];
        for (int l = 0; l < W; ++l) base[l] = top[l] == -infinity<double> ? 0.0 : top[l];
        for (int64_t k = 0; k < d; ++k) {
#pragma omp simd
            for (int l = 0; l < W; ++l) r[k * W + l] = Real(x[k * W + l] - base[l]);
        }
    }

    void relate(int64_t i) {
        if constexpr (Omega::by_slot) {
            const int64_t begin = graph.offset[i], d = graph.offset[i + 1] - begin;
            for (int64_t k = 0; k < d; ++k) {
                for (int l = 0; l < W; ++l) r[k * W + l] = threshold[i * W + l] == double(k) ? Real(0) : -infinity<Real>;
            }
        } else {
            double top[W];
            score(i, top);
        }
    }

    double log_slope(int64_t i, int64_t k, int l) const {
        return double(omega.log_slope(r[k * W + l], Real(threshold[i * W + l])));
    }

    // q and s of the edges into node i. q is made to sum to 1: over a long path its rounding would add up.
    void weigh(int64_t i) {
        relate(i);
        const int64_t d = graph.offset[i + 1] - graph.offset[i];
        const Omega local = omega;
        Real tau[W];
        double sum[W] = {};
        for (int l = 0; l < W; ++l) tau[l] = Real(threshold[i * W + l]);
        for (int64_t k = 0; k < d; ++k) {
#pragma omp simd
            for (int l = 0; l < W; ++l) {
                Real edge_q, edge_s;
                local.weigh(r[k * W + l], tau[l], edge_q, edge_s);
                sum[l] += q[k * W + l] = double(edge_q);
                s[k * W + l] = double(edge_s);
            }
        }
        for (int l = 0; l < W; ++l) sum[l] = sum[l] > 0 ? 1 / sum[l] : 1;
        for (int64_t k = 0; k < d; ++k) {
#pragma omp simd
            for (int l = 0; l < W; ++l) q[k * W + l] *= sum[l];
        }
    }
};

// Runs body(first row, Ω, lanes) for blocks of rows over the threads.
template <class S, class Body>
void for_blocks(const Problem<S>& problem, Body body) {
    with_omega<S>(problem.omega, [&](auto omega) {
        if (problem.batch == 1) {
            body(int64_t(0), omega, std::integral_constant<int, 1>());
        } else {
            parallel_for((problem.batch + lanes - 1) / lanes, problem.threads,
                         [&](int64_t b) { body(b * lanes, omega, std::integral_constant<int, lanes>()); });
        }
    });
}

// Whether no θ of the block is NaN or +∞.
template <class S, class Omega, int W>
bool forward_block(const Problem<S>& problem, int64_t first, S* value, double* tape) {
    using Real = typename Omega::Real;
    const Graph& graph = problem.graph;
    const int64_t nodes = graph.num_nodes;
    const Rows<double, W> out(tape, nodes * 2, problem.batch, first);
    Block<S, Omega, W> block(problem, first);
    for (int l = 0; l < W; ++l) block.value[l] = block.threshold[l] = 0;
    double above[W] = {};
    for (int64_t i = 1; i < nodes; ++i) {
        const int64_t begin = graph.offset[i], d = graph.offset[i + 1] - begin;
        double top[W];
        block.score(i, top);
        for (int64_t k = 0; k < d; ++k) {
            S weight[W];
            block.theta.read(graph.edge[begin + k], weight);
#pragma omp simd
            for (int l = 0; l < W; ++l) above[l] = weight[l] < infinity<S> ? above[l] : 1.0;
        }
        double *v = &block.value[i * W], *tau = &block.threshold[i * W];
        if constexpr (Omega::by_slot) {
            for (int l = 0; l < W; ++l) {
                int64_t k = 0;
                while (k < d && !(block.x[k * W + l] >= top[l])) ++k;
                v[l] = top[l];
                tau[l] = top[l] == -infinity<double> ? -1.0 : double(k);
            }
        } else {
            Real relative_tau[W], relative_value[W];
            using V = std::conditional_t<W == 1, Real, Vec<Real>>;
            for (int l = 0; l < W; l += sizeof(V) / sizeof(Real)) {
                V lane_tau, lane_value;
                block.omega.solve(Columns<V, Real>{&block.r[l], W, d}, V{}, lane_tau, lane_value);
                std::memcpy(&relative_tau[l], &lane_tau, sizeof(V));
                std::memcpy(&relative_value[l], &lane_value, sizeof(V));
            }
            for (int l = 0; l < W; ++l) {
                const bool reached = top[l] > -infinity<double>;
                v[l] = reached ? top[l] + double(relative_value[l]) : -infinity<double>;
                tau[l] = reached ? double(relative_tau[l]) : 0.0;
            }
        }
    }
    for (int64_t i = 0; i < nodes; ++i) {
        out.write(i, &block.value[i * W]);
        out.write(i + nodes, &block.threshold[i * W]);
    }
    Rows<S, W>(value, 1, problem.batch, first).write(0, &block.value[(nodes - 1) * W]);
    bool good = true;
    for (int l = 0; l < W; ++l) good &= above[l] == 0;
    return good;
}

template <class S>
bool forward(const Problem<S>& problem, S* value, double* tape) {
    bool good = true;
    for_blocks(problem, [&](int64_t first, const auto& omega, auto width) {
        if (!forward_block<S, std::decay_t<decltype(omega)>, width()>(problem, first, value, tape)) {
#pragma omp atomic write
            good = false;
        }
    });
    return good;
}

template <int W>
bool all_zero(const double* a) {
    bool zero = true;
    for (int l = 0; l < W; ++l) zero &= a[l] == 0;
    return zero;
}

template <class S>
void backward(const Problem<S>& problem, const S* seed, S* path) {
    for_blocks(problem, [&](int64_t first, const auto& omega, auto width) {
        constexpr int W = width();
        Block<S, std::decay_t<decltype(omega)>, W> block(problem, first);
        block.read_tape(problem, first);
        const Graph& graph = problem.graph;
        const Rows<S, W> out(path, graph.num_edges, problem.batch, first);
        const Rows<const S, W> seeds(seed, 1, problem.batch, first);
        const auto mass = zeros<double>(graph.num_nodes * W);
        seeds.read(0, &mass[(graph.num_nodes - 1) * W]);
        for (int64_t i = graph.num_nodes - 1; i > 0; --i) {
            const int64_t begin = graph.offset[i], d = graph.offset[i + 1] - begin;
            const double* held = &mass[i * W];
            const bool visited = !all_zero<W>(held);
            if (visited) block.weigh(i);
            for (int64_t k = 0; k < d; ++k) {
                double e[W] = {};
                if (visited) {
                    double* to = &mass[graph.parent[begin + k] * W];
#pragma omp simd
                    for (int l = 0; l < W; ++l) to[l] += e[l] = block.q[k * W + l] * held[l];
                }
                out.write(graph.edge[begin + k], e);
            }
        }
    });
}

// v̇ of every node and, for J y = s∘(y − mean), the mean ⟨s, y⟩/Σs of every node.
template <class S, class Omega, int W>
struct Tangent {
    std::unique_ptr<double[]> value, mean;
    Rows<const S, W> z;
    const Graph& graph;

    Tangent(Block<S, Omega, W>& block, const Problem<S>& problem, const S* direction, int64_t first)
        : value(scratch<double>(problem.graph.num_nodes * W)),
          mean(scratch<double>(problem.graph.num_nodes * W)),
          z(direction, problem.graph.num_edges, problem.batch, first),
          graph(problem.graph) {
        for (int l = 0; l < W; ++l) value[l] = mean[l] = 0;
        for (int64_t i = 1; i < graph.num_nodes; ++i) {
            const int64_t begin = graph.offset[i], d = graph.offset[i + 1] - begin;
            double sum_qy[W] = {}, sum_sy[W] = {}, sum_s[W] = {};
            block.weigh(i);
            for (int64_t k = 0; k < d; ++k) {
                double y[W];
                along(begin + k, y);
                const double *q = &block.q[k * W], *s = &block.s[k * W];
#pragma omp simd
                for (int l = 0; l < W; ++l) {
                    sum_qy[l] += q[l] > 0 ? q[l] * y[l] : 0.0;
                    sum_sy[l] += s[l] > 0 ? s[l] * y[l] : 0.0;
                    sum_s[l] += s[l];
                }
            }
            for (int l = 0; l < W; ++l) {
                value[i * W + l] = sum_qy[l];
                mean[i * W + l] = sum_s[l] > 0 ? sum_sy[l] / sum_s[l] : 0.0;
            }
        }
    }

    // y = z + v̇ at the parent's side of an edge.
    void along(int64_t slot, double* y) const {
        z.read(graph.edge[slot], y);
        const double* from = &value[graph.parent[slot] * W];
#pragma omp simd
        for (int l = 0; l < W; ++l) y[l] += from[l];
    }
};

template <class S>
void hessian(const Problem<S>& problem, const S* seed, const S* z, S* product) {
    for_blocks(problem, [&](int64_t first, const auto& omega, auto width) {
        constexpr int W = width();
        using Omega = std::decay_t<decltype(omega)>;
        Block<S, Omega, W> block(problem, first);
        block.read_tape(problem, first);
        const Tangent<S, Omega, W> tangent(block, problem, z, first);
        const Graph& graph = problem.graph;
        const Rows<S, W> out(product, graph.num_edges, problem.batch, first);
        double seeds[W];
        Rows<const S, W>(seed, 1, problem.batch, first).read(0, seeds);
        const auto mass = zeros<double>(graph.num_nodes * W), mass_dot = zeros<double>(graph.num_nodes * W);
        for (int l = 0; l < W; ++l) mass[(graph.num_nodes - 1) * W + l] = 1;
        for (int64_t i = graph.num_nodes - 1; i > 0; --i) {
            const int64_t begin = graph.offset[i], d = graph.offset[i + 1] - begin;
            const double *held = &mass[i * W], *held_dot = &mass_dot[i * W], *mean = &tangent.mean[i * W];
            const bool visited = !all_zero<W>(held) || !all_zero<W>(held_dot);
            if (visited) block.weigh(i);
            for (int64_t k = 0; k < d; ++k) {
                double e_dot[W] = {};
                if (visited) {
                    double y[W];
                    tangent.along(begin + k, y);
                    const double *q = &block.q[k * W], *s = &block.s[k * W];
                    const int64_t parent = graph.parent[begin + k] * W;
#pragma omp simd
                    for (int l = 0; l < W; ++l) {
                        const double source = s[l] > 0 && held[l] > 0 ? s[l] * (y[l] - mean[l]) * held[l] : 0.0;
                        e_dot[l] = source + q[l] * held_dot[l];
                        mass[parent + l] += q[l] * held[l];
                        mass_dot[parent + l] += e_dot[l];
                        e_dot[l] *= seeds[l];
                    }
                }
                out.write(graph.edge[begin + k], e_dot);
            }
        }
    });
}

template <class S>
void log_transitions(const Problem<S>& problem, S* log_q) {
    for_blocks(problem, [&](int64_t first, const auto& omega, auto width) {
        constexpr int W = width();
        using Omega = std::decay_t<decltype(omega)>;
        Block<S, Omega, W> block(problem, first);
        block.read_tape(problem, first);
        const Graph& graph = problem.graph;
        const Rows<S, W> out(log_q, graph.num_edges, problem.batch, first);
        for (int64_t i = 1; i < graph.num_nodes; ++i) {
            block.relate(i);
            for (int64_t k = 0; k < graph.offset[i + 1] - graph.offset[i]; ++k) {
                typename Omega::Real log[W];
                for (int l = 0; l < W; ++l) {
                    log[l] = omega.log_q(block.r[k * W + l], typename Omega::Real(block.threshold[i * W + l]));
                }
                out.write(graph.edge[graph.offset[i] + k], log);
            }
        }
    });
}

template <class S>
void log_transitions_jvp(const Problem<S>& problem, const S* z, S* product) {
    for_blocks(problem, [&](int64_t first, const auto& omega, auto width) {
        constexpr int W = width();
        using Omega = std::decay_t<decltype(omega)>;
        Block<S, Omega, W> block(problem, first);
        block.read_tape(problem, first);
        const Tangent<S, Omega, W> tangent(block, problem, z, first);
        const Graph& graph = problem.graph;
        const Rows<S, W> out(product, graph.num_edges, problem.batch, first);
        for (int64_t i = 1; i < graph.num_nodes; ++i) {
            block.relate(i);
            for (int64_t k = 0; k < graph.offset[i + 1] - graph.offset[i]; ++k) {
                double y[W];
                tangent.along(graph.offset[i] + k, y);
                for (int l = 0; l < W; ++l) {
                    const double slope = block.log_slope(i, k, l);
                    y[l] = slope > 0 ? slope * (y[l] - tangent.mean[i * W + l]) : 0.0;
                }
                out.write(graph.edge[graph.offset[i] + k], y);
            }
        }
    });
}

template <class S>
void log_transitions_vjp(const Problem<S>& problem, const S* cotangent, S* product) {
    for_blocks(problem, [&](int64_t first, const auto& omega, auto width) {
        constexpr int W = width();
        Block<S, std::decay_t<decltype(omega)>, W> block(problem, first);
        block.read_tape(problem, first);
        const Graph& graph = problem.graph;
        const Rows<const S, W> given(cotangent, graph.num_edges, problem.batch, first);
        const Rows<S, W> out(product, graph.num_edges, problem.batch, first);
        const auto mass = zeros<double>(graph.num_nodes * W), scaled = scratch<double>(graph.max_parents * W);
        for (int64_t i = graph.num_nodes - 1; i > 0; --i) {
            const int64_t begin = graph.offset[i], d = graph.offset[i + 1] - begin;
            double sum_c[W] = {}, sum_s[W] = {};
            block.weigh(i);
            for (int64_t k = 0; k < d; ++k) {
                double* c = &scaled[k * W];
                given.read(graph.edge[begin + k], c);
                for (int l = 0; l < W; ++l) {
                    const double slope = block.log_slope(i, k, l);
                    c[l] = slope > 0 ? slope * c[l] : 0.0;
                    sum_c[l] += c[l];
                    sum_s[l] += block.s[k * W + l];
                }
            }
            for (int64_t k = 0; k < d; ++k) {
                double* c = &scaled[k * W];
                for (int l = 0; l < W; ++l) {
                    const double mean = sum_s[l] > 0 ? sum_c[l] / sum_s[l] : 0.0;
                    c[l] += block.q[k * W + l] * mass[i * W + l] - block.s[k * W + l] * mean;
                    mass[graph.parent[begin + k] * W + l] += c[l];
                }
                out.write(graph.edge[begin + k], c);
            }
        }
    });
}

// One walk from the end for every draw and row: its n-th choice takes the n-th uniform. False if there are too few.
template <class S>
bool sample(const Problem<S>& problem, int64_t draws, int64_t choices, const double* uniforms, S* paths) {
    const Graph& graph = problem.graph;
    std::atomic<bool> enough{true};
    with_omega<double>(problem.omega, [&](const auto& omega) {
        using Omega = std::decay_t<decltype(omega)>;
        parallel_for(draws * problem.batch, problem.threads, [&](int64_t walk) {
            const int64_t b = walk / draws;
            const double *value = problem.tape + b * 2 * graph.num_nodes, *threshold = value + graph.num_nodes;
            const S* theta = problem.theta + b * graph.num_edges;
            S* path = paths + walk * graph.num_edges;
            for (int64_t e = 0; e < graph.num_edges; ++e) path[e] = 0;
            const auto q = scratch<double>(graph.max_parents);
            const double* uniform = uniforms + walk * choices;
            const double* const last = uniform + choices;
            for (int64_t i = graph.num_nodes - 1; i > 0 && value[i] > -infinity<double>;) {
                if (uniform == last) {
                    enough = false;
                    return;
                }
                const int64_t begin = graph.offset[i], d = graph.offset[i + 1] - begin;
                double top = -infinity<double>, total = 0, sum = 0, s;
                for (int64_t k = 0; k < d; ++k) {
                    q[k] = double(theta[graph.edge[begin + k]]) + value[graph.parent[begin + k]];
                    top = q[k] > top ? q[k] : top;
                }
                for (int64_t k = 0; k < d; ++k) {
                    const double chosen = threshold[i] == double(k) ? 0.0 : -infinity<double>;
                    omega.weigh(Omega::by_slot ? chosen : q[k] - top, threshold[i], q[k], s);
                    total += q[k];
                }
                int64_t k = -1;
                do sum += q[++k];
                while (k + 1 < d && sum <= *uniform * total);
                ++uniform;
                path[graph.edge[begin + k]] = 1;
                i = graph.parent[begin + k];
            }
        });
    });
    return enough;
}

template <class S>
bool topk(const Problem<S>& problem, int64_t k, S* scores, S* paths) {
    const Graph& graph = problem.graph;
    const int64_t nodes = graph.num_nodes;
    for (int64_t e = 0; e < problem.batch * graph.num_edges; ++e) {
        if (!(problem.theta[e] < infinity<S>)) return false;
    }
    parallel_for(problem.batch, problem.threads, [&](int64_t b) {
        const S* theta = problem.theta + b * graph.num_edges;
        // The k best ways into each node: score, slot of the last edge, rank of the rest at the parent.
        const auto best = scratch<double>(nodes * k);
        const auto slot_of = scratch<int64_t>(nodes * k), rank_of = scratch<int64_t>(nodes * k);
        for (int64_t n = 0; n < nodes * k; ++n) best[n] = -infinity<double>;
        best[0] = 0;
        for (int64_t i = 1; i < nodes; ++i) {
            double* list = &best[i * k];
            for (int64_t slot = graph.offset[i]; slot < graph.offset[i + 1]; ++slot) {
                const double* from = &best[graph.parent[slot] * k];
                for (int64_t rank = 0; rank < k; ++rank) {
                    const double score = double(theta[graph.edge[slot]]) + from[rank];
                    if (!(score > list[k - 1])) break;
                    int64_t place = k - 1;
                    for (; place > 0 && score > list[place - 1]; --place) {
                        list[place] = list[place - 1];
                        slot_of[i * k + place] = slot_of[i * k + place - 1];
                        rank_of[i * k + place] = rank_of[i * k + place - 1];
                    }
                    list[place] = score;
                    slot_of[i * k + place] = slot;
                    rank_of[i * k + place] = rank;
                }
            }
        }
        for (int64_t n = 0; n < k; ++n) {
            const double score = best[(nodes - 1) * k + n];
            S* path = paths + (b * k + n) * graph.num_edges;
            scores[b * k + n] = S(score);
            for (int64_t e = 0; e < graph.num_edges; ++e) path[e] = 0;
            if (score == -infinity<double>) continue;
            for (int64_t i = nodes - 1, rank = n; i > 0;) {
                const int64_t slot = slot_of[i * k + rank];
                path[graph.edge[slot]] = 1;
                rank = rank_of[i * k + rank];
                i = graph.parent[slot];
            }
        }
    });
    return true;
}

}  // namespace

template <class S>
DagKernels<S> dag_kernels() {
    return {forward<S>,         backward<S>,         hessian<S>, log_transitions<S>, log_transitions_jvp<S>,
            log_transitions_vjp<S>, sample<S>, topk<S>};
}

template DagKernels<float> dag_kernels<float>();
template DagKernels<double> dag_kernels<double>();

}  // namespace bellmax::BELLMAX_ARCH
