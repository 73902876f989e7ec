// The sweeps of a DAG (Algorithms 1 and 2 of the paper). W sequences of the batch go through the graph side by side,
// one per lane; threads take different sequences. Node quantities are double throughout: a float value of a long path
// has lost the digits that its neighbours' differences need.
#include "dag.h"

#include <cstddef>
#include <memory>

#ifndef BELLMAX_ARCH
#error "compile with -DBELLMAX_ARCH=baseline or avx2"
#endif

namespace bellmax::BELLMAX_ARCH {
namespace {

using std::int64_t;

constexpr int lanes = 8;

template <class T>
std::unique_ptr<T[]> scratch(int64_t size) {
    return std::unique_ptr<T[]>(new T[static_cast<std::size_t>(size)]);
}

template <class T>
std::unique_ptr<T[]> zeros(int64_t size) {
    return std::unique_ptr<T[]>(new T[static_cast<std::size_t>(size)]());
}

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

// What the sweeps after the first see of a block of W rows: values and thresholds by node, side by side.
template <class S, class Omega, int W>
struct Block {
    const Graph& graph;
    Omega omega;
    Rows<const S, W> theta;
    std::unique_ptr<double[]> value, threshold;  // by node
    std::unique_ptr<double[]> q, s;              // by edge into the node that was weighed last

    Block(const Problem<S>& problem, int64_t first)
        : graph(problem.graph),
          omega(problem.omega),
          theta(problem.theta, graph.num_edges, problem.batch, first),
          value(scratch<double>(graph.num_nodes * W)),
          threshold(scratch<double>(graph.num_nodes * W)),
          q(scratch<double>(graph.max_parents * W)),
          s(scratch<double>(graph.max_parents * W)) {
        const int64_t nodes = graph.num_nodes, rows = tape_rows(problem.omega);
        const Rows<const double, W> tape(problem.tape, nodes * rows, problem.batch, first);
        for (int64_t i = 0; i < nodes; ++i) {
            tape.read(i, &value[i * W]);
            tape.read(i + nodes * (rows - 1), &threshold[i * W]);
            if (Omega::threshold_is_value) {
                for (int l = 0; l < W; ++l) {
                    double& tau = threshold[i * W + l];
                    if (tau == -infinity<double>) tau = infinity<double>;  // a node that no path reaches
                }
            }
        }
    }

    // x − τ of the edge at a slot into node i; for the hard max, whether it is the chosen one.
    void local(int64_t i, int64_t slot, S* x) const {
        S weight[W];
        theta.read(graph.edge[slot], weight);
        const double* from = &value[graph.parent[slot] * W];
        const double* tau = &threshold[i * W];
        if (Omega::by_slot) {
#pragma omp simd
            for (int l = 0; l < W; ++l) x[l] = tau[l] == double(slot) ? S(1) : S(0);
        } else {
#pragma omp simd
            for (int l = 0; l < W; ++l) x[l] = S(double(weight[l]) + (from[l] - tau[l]));
        }
    }

    // q and s of the edges into node i. q is made to sum to 1: over a long path its rounding would add up.
    void weigh(int64_t i) {
        const int64_t begin = graph.offset[i], d = graph.offset[i + 1] - begin;
        double sum[W] = {};
        for (int64_t k = 0; k < d; ++k) {
            S x[W];
            local(i, begin + k, x);
#pragma omp simd
            for (int l = 0; l < W; ++l) {
                S edge_q, edge_s;
                omega.weigh(x[l], edge_q, edge_s);
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

// Runs body(first row, Omega, lanes) for blocks of rows over the threads.
template <class S, class Body>
void for_blocks(const Problem<S>& problem, Body body) {
    with_omega<S>(problem.omega, [&](auto omega) {
        const int64_t batch = problem.batch;
        if (batch == 1) {
            body(int64_t(0), omega, std::integral_constant<int, 1>());
            return;
        }
        const int64_t blocks = (batch + lanes - 1) / lanes;
#pragma omp parallel for schedule(dynamic) num_threads(problem.threads) if (blocks > 1)
        for (int64_t b = 0; b < blocks; ++b) body(b * lanes, omega, std::integral_constant<int, lanes>());
    });
}

template <class S, class Omega, int W>
void forward_block(const Problem<S>& problem, int64_t first, const Omega& omega, S* value, double* tape) {
    const Graph& graph = problem.graph;
    const int64_t nodes = graph.num_nodes, rows = tape_rows(problem.omega);
    const Rows<const S, W> theta(problem.theta, graph.num_edges, problem.batch, first);
    const Rows<double, W> out(tape, nodes * rows, problem.batch, first);
    const auto v = scratch<double>(nodes * W), x = scratch<double>(graph.max_parents * W);
    const auto r = scratch<S>(graph.max_parents * W);
    for (int l = 0; l < W; ++l) v[l] = 0;
    out.write(0, &v[0]);
    out.write(nodes * (rows - 1), &v[0]);
    for (int64_t i = 1; i < nodes; ++i) {
        const int64_t begin = graph.offset[i], d = graph.offset[i + 1] - begin;
        double top[W], tau[W];
        for (int l = 0; l < W; ++l) top[l] = -infinity<double>, tau[l] = -1;
        for (int64_t k = 0; k < d; ++k) {
            S weight[W];
            theta.read(graph.edge[begin + k], weight);
            const double* from = &v[graph.parent[begin + k] * W];
#pragma omp simd
            for (int l = 0; l < W; ++l) {
                const double score = double(weight[l]) + from[l];
                x[k * W + l] = score;
                if (Omega::by_slot) tau[l] = score > top[l] ? double(begin + k) : tau[l];
                top[l] = score > top[l] ? score : top[l];
            }
        }
        double* vi = &v[i * W];
        if constexpr (Omega::by_slot) {
            for (int l = 0; l < W; ++l) vi[l] = top[l];
        } else {
            S relative_tau[W], relative_value[W];
            double base[W];
            for (int l = 0; l < W; ++l) base[l] = top[l] == -infinity<double> ? 0.0 : top[l];
            for (int64_t k = 0; k < d; ++k) {
#pragma omp simd
                for (int l = 0; l < W; ++l) r[k * W + l] = S(x[k * W + l] - base[l]);
            }
            omega.template solve<W>(r.get(), d, relative_tau, relative_value);
            for (int l = 0; l < W; ++l) {
                vi[l] = top[l] + double(relative_value[l]);
                tau[l] = top[l] == -infinity<double> ? infinity<double> : top[l] + double(relative_tau[l]);
            }
        }
        if (rows == 2) out.write(i + nodes, tau);
        out.write(i, vi);
    }
    Rows<S, W>(value, 1, problem.batch, first).write(0, &v[(nodes - 1) * W]);
}

template <class S>
void forward(const Problem<S>& problem, S* value, double* tape) {
    for_blocks(problem, [&](int64_t first, const auto& omega, auto width) {
        forward_block<S, std::decay_t<decltype(omega)>, width()>(problem, first, omega, value, tape);
    });
}

template <int W>
bool all_zero(const double* a) {
    bool zero = true;
    for (int l = 0; l < W; ++l) zero &= a[l] == 0;
    return zero;
}

template <class S>
void backward(const Problem<S>& problem, S* path) {
    for_blocks(problem, [&](int64_t first, const auto& omega, auto width) {
        constexpr int W = width();
        Block<S, std::decay_t<decltype(omega)>, W> block(problem, first);
        const Graph& graph = problem.graph;
        const Rows<S, W> out(path, graph.num_edges, problem.batch, first);
        const auto mass = zeros<double>(graph.num_nodes * W);
        for (int l = 0; l < W; ++l) mass[(graph.num_nodes - 1) * W + l] = 1;
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
void hessian(const Problem<S>& problem, const S* z, S* product) {
    for_blocks(problem, [&](int64_t first, const auto& omega, auto width) {
        constexpr int W = width();
        using Omega = std::decay_t<decltype(omega)>;
        Block<S, Omega, W> block(problem, first);
        const Tangent<S, Omega, W> tangent(block, problem, z, first);
        const Graph& graph = problem.graph;
        const Rows<S, W> out(product, graph.num_edges, problem.batch, first);
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
        const Block<S, std::decay_t<decltype(omega)>, W> block(problem, first);
        const Rows<S, W> out(log_q, problem.graph.num_edges, problem.batch, first);
        for (int64_t i = 1; i < problem.graph.num_nodes; ++i) {
            for (int64_t slot = problem.graph.offset[i]; slot < problem.graph.offset[i + 1]; ++slot) {
                S x[W];
                block.local(i, slot, x);
#pragma omp simd
                for (int l = 0; l < W; ++l) x[l] = omega.log_q(x[l]);
                out.write(problem.graph.edge[slot], x);
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
        const Tangent<S, Omega, W> tangent(block, problem, z, first);
        const Rows<S, W> out(product, problem.graph.num_edges, problem.batch, first);
        for (int64_t i = 1; i < problem.graph.num_nodes; ++i) {
            for (int64_t slot = problem.graph.offset[i]; slot < problem.graph.offset[i + 1]; ++slot) {
                S x[W];
                double y[W];
                block.local(i, slot, x);
                tangent.along(slot, y);
                for (int l = 0; l < W; ++l) {
                    const double slope = double(omega.log_slope(x[l]));
                    y[l] = slope > 0 ? slope * (y[l] - tangent.mean[i * W + l]) : 0.0;
                }
                out.write(problem.graph.edge[slot], y);
            }
        }
    });
}

template <class S>
void log_transitions_vjp(const Problem<S>& problem, const S* cotangent, S* product) {
    for_blocks(problem, [&](int64_t first, const auto& omega, auto width) {
        constexpr int W = width();
        Block<S, std::decay_t<decltype(omega)>, W> block(problem, first);
        const Graph& graph = problem.graph;
        const Rows<const S, W> given(cotangent, graph.num_edges, problem.batch, first);
        const Rows<S, W> out(product, graph.num_edges, problem.batch, first);
        const auto mass = zeros<double>(graph.num_nodes * W), scaled = scratch<double>(graph.max_parents * W);
        for (int64_t i = graph.num_nodes - 1; i > 0; --i) {
            const int64_t begin = graph.offset[i], d = graph.offset[i + 1] - begin;
            double sum_c[W] = {}, sum_s[W] = {};
            block.weigh(i);
            for (int64_t k = 0; k < d; ++k) {
                S x[W];
                block.local(i, begin + k, x);
                double* c = &scaled[k * W];
                given.read(graph.edge[begin + k], c);
                for (int l = 0; l < W; ++l) {
                    const double slope = double(omega.log_slope(x[l]));
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

// One walk from the end for every draw and row: a uniform for each node, of which only the visited ones are used.
template <class S>
void sample(const Problem<S>& problem, int64_t draws, const double* uniforms, S* paths) {
    const Graph& graph = problem.graph;
    const int64_t nodes = graph.num_nodes, rows = tape_rows(problem.omega), walks = draws * problem.batch;
    with_omega<double>(problem.omega, [&](const auto& omega) {
        using Omega = std::decay_t<decltype(omega)>;
#pragma omp parallel for schedule(static) num_threads(problem.threads) if (walks > 1)
        for (int64_t walk = 0; walk < walks; ++walk) {
            const int64_t b = walk / draws;
            const double *value = problem.tape + b * rows * nodes, *threshold = value + (rows - 1) * nodes;
            const S* theta = problem.theta + b * graph.num_edges;
            S* path = paths + walk * graph.num_edges;
            for (int64_t e = 0; e < graph.num_edges; ++e) path[e] = 0;
            const auto probability = [&](int64_t i, int64_t slot) {
                double q, s;
                const double x = double(theta[graph.edge[slot]]) + (value[graph.parent[slot]] - threshold[i]);
                omega.weigh(Omega::by_slot ? double(threshold[i] == double(slot)) : x, q, s);
                return q;
            };
            for (int64_t i = nodes - 1; i > 0 && value[i] > -infinity<double>;) {
                double total = 0;
                for (int64_t slot = graph.offset[i]; slot < graph.offset[i + 1]; ++slot) total += probability(i, slot);
                const double target = uniforms[walk * nodes + i] * total;
                int64_t slot = graph.offset[i];
                for (double sum = probability(i, slot); sum <= target; sum += probability(i, slot)) ++slot;
                path[graph.edge[slot]] = 1;
                i = graph.parent[slot];
            }
        }
    });
}

template <class S>
void topk(const Problem<S>& problem, int64_t k, S* scores, S* paths) {
    const Graph& graph = problem.graph;
    const int64_t nodes = graph.num_nodes;
#pragma omp parallel for schedule(dynamic) num_threads(problem.threads) if (problem.batch > 1)
    for (int64_t b = 0; b < problem.batch; ++b) {
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
    }
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
