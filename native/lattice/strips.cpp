#include "strips.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

Strip::Strip(const Region& region, int64_t s)
    : row(s * strip_rows), rows(std::min(strip_rows, region.rows - row)) {
    for (int64_t r = 0; r < strip_rows; ++r) {
        from[r] = r < rows ? region.first(row + r) : region.columns + strip_rows;
        to[r] = r < rows ? region.last(row + r) : -1;
    }
    groups = (rows + group - 1) / group;
    first = from[0];
    last = to[rows - 1];
    steps = last - first + rows;
    chunks = (steps + chunk_steps - 1) / chunk_steps;
    all_leave = steps;
    for (int64_t r = 0; r < strip_rows; ++r) {
        begins[r] = std::int32_t(from[r] + r - first);
        ends[r] = r < rows ? std::int32_t(to[r] + r - first) : -1;
    }
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t top = group * g, bottom = std::min(group * (g + 1), rows) - 1;
        wakes[g] = begins[top];
        sleeps[g] = ends[bottom];
        enter[g] = begins[group * (g + 1) - 1];
        leave[g] = bottom == group * (g + 1) - 1 ? ends[top] : -1;
        all_enter = std::max(all_enter, enter[g]);
        all_leave = std::min(all_leave, leave[g]);
    }
}

namespace {

template <class S>
struct Look {
    using V = Vec<S>;
    V greatest{};
    typename Shape<V>::Int bad{};

    // As many vectors as a vector has lanes. Magnitudes are in order by their bits too, where ∞ and NaN come last: few
    // have to be looked at more closely.
    __attribute__((always_inline)) void at(const V* v, S sign) {
        if constexpr (std::is_same_v<S, float>) {
            using Int = typename Shape<V>::Int;
            Int most{};
            for (int l = 0; l < lanes_of<S>; ++l) most = greater_int(most, bits<Int>(v[l]) & 0x7fffffff);
            greatest = greater<S>(greatest, most < 0x7f800000 ? bits<V>(most) : V{});
            if (!any(most >= 0x7f800000)) return;
        }
        for (int l = 0; l < lanes_of<S>; ++l) {
            bad |= ~(v[l] * sign < V{} + infinity<S>);
            const V size = v[l] < V{} ? -v[l] : v[l];
            greatest = greater<S>(size < V{} + infinity<S> ? size : V{}, greatest);
        }
    }
    Seen seen() const { return {double(greatest_lane<S>(greatest)[0]), any(bad)}; }
};

// How far on a row the same place of the next chunk is or, after the last one, of the next strip. There are too many
// rows for the processor to foresee that.
int64_t next_chunk(const Strip& strip, int64_t column, int64_t stride, Way way) {
    const int64_t turn = strip_rows * stride - (strip.last + 1 - strip.first);
    if (way == Way::forth) return chunk_steps + (column + chunk_steps > strip.last ? turn : 0);
    return -chunk_steps - (column - chunk_steps < strip.first ? turn : 0);
}

// Whether a matrix has the cells of `count` rows from i on, of as many steps, where row i begins with column j.
bool has_all(const WindowMatrix& matrix, int64_t i, int64_t j, int64_t count) {
    return matrix.has(i, j - count + 1) && matrix.has(i + count - 1, j + count - 1);
}
// The columns that both the row r of a strip and a matrix have.
Range columns_of(const WindowMatrix& matrix, const Strip& strip, int64_t r) {
    const int64_t i = strip.row + r;
    const Window& w = matrix.window;
    if (i < w.row || i >= w.row + w.rows) return {0, -1};
    return {std::max(strip.from[r], w.column), std::min(strip.to[r], w.column + w.columns - 1)};
}

// Rows outer, so that few lines of the cache are in use at once.
template <class S, class Real>
Seen fill_from(const WindowMatrix& matrix, const Strip& strip, int64_t c, Way way, double scale, bool looks,
               Real* __restrict tile) {
    constexpr int V = lanes_of<S>;
    const int64_t count = strip.steps_in(c), stride = matrix.stride;
    Look<S> look;
    for (int64_t r = 0; r < strip.groups * group; r += V) {
        for (int64_t k = 0; k < count; k += V) {
            const int64_t t = c * chunk_steps + k;
            if (!strip.is_awake(r, t, V)) continue;
            const int64_t column = strip.first + t - r;
            const S* const corner = matrix.at<S>(strip.row + r, column);
            Vec<S> v[V];
            if (strip.covers(r, t, V) && has_all(matrix, strip.row + r, column, V)) {
                const int64_t next = next_chunk(strip, column, stride, way);
                for (int l = 0; l < V; ++l) {
                    v[l] = load<S>(corner + l * (stride - 1));
                    __builtin_prefetch(corner + l * (stride - 1) + next);
                }
            } else {
                for (int l = 0; l < V; ++l) {
                    const Range own = columns_of(matrix, strip, r + l);
                    v[l] = load_between<S>(corner + l * (stride - 1), own.low - (column - l), own.high - (column - l),
                                           S(matrix.missing));
                }
            }
            if (looks) look.at(v, S(scale));
            transpose(v);
            for (int l = 0; l < V; ++l) {
                const auto own = __builtin_convertvector(v[l], Part<Real, V>);
                std::memcpy(tile + (k + l) * strip_rows + r, &own, sizeof own);
            }
        }
    }
    return look.seen();
}

template <class S, class Real>
void drain_to(const WindowMatrix& matrix, const Strip& strip, int64_t c, const Real* __restrict tile) {
    constexpr int V = lanes_of<S>;
    using InTile = Part<Real, V>;
    const int64_t count = strip.steps_in(c), stride = matrix.stride;
    for (int64_t r = 0; r < strip.groups * group; r += V) {
        for (int64_t k = 0; k < count; k += V) {
            const int64_t t = c * chunk_steps + k;
            if (!strip.is_awake(r, t, V)) continue;
            const int64_t column = strip.first + t - r;
            S* const corner = matrix.at<S>(strip.row + r, column);
            Vec<S> v[V];
            for (int l = 0; l < V; ++l) {
                v[l] = __builtin_convertvector(load_vector<InTile>(tile + (k + l) * strip_rows + r), Vec<S>);
            }
            transpose(v);
            if (strip.covers(r, t, V) && has_all(matrix, strip.row + r, column, V)) {
                const int64_t next = next_chunk(strip, column, stride, Way::back);
                for (int l = 0; l < V; ++l) {
                    store<S>(corner + l * (stride - 1), v[l]);
                    __builtin_prefetch(corner + l * (stride - 1) + next, 1);
                }
            } else {
                for (int l = 0; l < V; ++l) {
                    const Range own = columns_of(matrix, strip, r + l);
                    store_between<S>(corner + l * (stride - 1), v[l], own.low - (column - l), own.high - (column - l));
                }
            }
        }
    }
}

template <class S>
void clear(const WindowMatrix& matrix, const Region& region) {
    const Window& w = matrix.window;
    for (int64_t i = w.row; i < w.row + w.rows; ++i) {
        S* const line = matrix.at<S>(i, w.column);
        const auto place = [&](int64_t j) { return std::clamp<int64_t>(j - w.column, 0, w.columns); };
        const int64_t from = i < region.rows ? place(region.first(i)) : 0;
        const int64_t to = i < region.rows ? place(region.last(i) + 1) : 0;
        std::fill(line, line + from, S(0));
        std::fill(line + to, line + w.columns, S(0));
    }
}

}  // namespace

Seen fill(const WindowMatrix& matrix, const Strip& strip, int64_t c, Way way, double scale, bool looks, float* tile) {
    return fill_from<float>(matrix, strip, c, way, scale, looks, tile);
}
Seen fill(const WindowMatrix& matrix, const Strip& strip, int64_t c, Way way, double scale, bool looks, double* tile) {
    if (matrix.is_double) return fill_from<double>(matrix, strip, c, way, scale, looks, tile);
    return fill_from<float>(matrix, strip, c, way, scale, looks, tile);
}

void drain(const WindowMatrix& matrix, const Strip& strip, int64_t c, const float* tile) {
    if (matrix.is_double) return drain_to<double>(matrix, strip, c, tile);
    drain_to<float>(matrix, strip, c, tile);
}
void drain(const WindowMatrix& matrix, const Strip& strip, int64_t c, const double* tile) {
    if (matrix.is_double) return drain_to<double>(matrix, strip, c, tile);
    drain_to<float>(matrix, strip, c, tile);
}

void clear_outside(const WindowMatrix& matrix, const Region& region) {
    if (matrix.is_double) return clear<double>(matrix, region);
    clear<float>(matrix, region);
}

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
