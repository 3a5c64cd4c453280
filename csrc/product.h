// Products of small matrices whose rows lie anywhere, at the speed of the machine. Included once per instruction set,
// inside its namespace.
//
// A tile of the result stays in registers from its first product to its last; then it is stored, or merged into rows that
// lie anywhere too. Vectors have no tails: what is read by vectors is padded with zeros.

constexpr int TILE_ROWS = 6;
constexpr int TILE_VECTORS = SMYRF_REGISTERS >= 32 ? 4 : 2;

template <class T>
inline T dot(const T* a, const T* b, int64_t n) {
    constexpr int W = Simd<T>::W;
    Vec<T> sums{};
    int64_t i = 0;
    for (; i + W <= n; i += W) sums += load(a + i) * load(b + i);
    T sum = 0;
    for (int j = 0; j < W; ++j) sum += sums[j];
    for (; i < n; ++i) sum += a[i] * b[i];
    return sum;
}

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Rows of a matrix: at equal distances, or each at its own place.
template <class T>
struct Strided {
    const T* data;
    int64_t stride;
    const T* operator()(int64_t i) const { return data + i * stride; }
};
template <class T>
struct Listed {
    const T* const* rows;
    const T* operator()(int64_t i) const { return rows[i]; }
};

// Where a tile goes: into a matrix of its own …
template <class T>
struct Store {
    T* data;
    int64_t stride;

    template <int R, int K>
    void operator()(int64_t row, int64_t column, const Vec<T> (&sum)[R][K]) const {
        constexpr int W = Simd<T>::W;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < K; ++v) store(data + (row + r) * stride + column + v * W, sum[r][v]);
    }
};
// … or into rows that hold something: row = keep · row + share · tile. Where keep is zero the row is not read. A null row
// takes nothing.
template <class T>
class Into {
   public:
    Into(T* const* to, const T* of_old, const T* of_new, int64_t n) : rows_(to), keep_(of_old), share_(of_new), width_(n) {}

    template <int R, int K>
    void operator()(int64_t row, int64_t column, const Vec<T> (&sum)[R][K]) const {
        constexpr int W = Simd<T>::W;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            T* to = rows_[row + r];
            if (to == nullptr) continue;
            to += column;
            const T a = keep_[row + r], b = share_[row + r];
            if (column + K * W > width_) {
                put_tail(sum[r], a, b, width_ - column, to);
            } else if (a == T(0)) {
#pragma GCC unroll 8
                for (int v = 0; v < K; ++v) store(to + v * W, sum[r][v] * b);
            } else {
#pragma GCC unroll 8
                for (int v = 0; v < K; ++v) store(to + v * W, load(to + v * W) * a + sum[r][v] * b);
            }
        }
    }

   private:
    T* const* rows_;
    const T *keep_, *share_;
    int64_t width_;

    // The end of a row that is not a multiple of a vector.
    template <int K>
    static void put_tail(const Vec<T> (&sum)[K], T a, T b, int64_t n, T* to) {
        constexpr int W = Simd<T>::W;
        alignas(64) T part[K * W];
        for (int v = 0; v < K; ++v) store(part + v * W, sum[v] * b);
        for (int64_t e = 0; e < n; ++e) to[e] = a == T(0) ? part[e] : to[e] * a + part[e];
    }
};

// Rows of the next group, fetched while this one is computed, a piece of four cache lines at a time: a burst would have to
// wait for itself, and what waits in between costs nothing.
class Prefetch {
   public:
    Prefetch() { clear(); }
    void clear() { n_ = at_ = 0; }
    // Those at `index` in a table; strides and sizes are in bytes.
    void add(const void* table, int64_t stride, int64_t bytes, const int32_t* index, int64_t n) {
        const int64_t pieces = (bytes + PIECE - 1) / PIECE;
        if (static_cast<int64_t>(queue_.size()) < n_ + n * pieces + 1) queue_.resize(n_ + n * pieces + 1);
        const char *data = static_cast<const char*>(table), **to = queue_.data() + n_;
        for (int64_t piece = 0; piece < pieces; ++piece, to += n)
            for (int64_t i = 0; i < n; ++i) to[i] = data + index[i] * stride + piece * PIECE;  // empty slots: in vain
        n_ += n * pieces;
        *to = data;  // what is fetched when all is done
    }
    bool empty() const { return n_ == 0; }
    const char* next() {
        const char* piece = queue_[at_];
        at_ += at_ < n_;
        return piece;
    }
    static void line(const char* piece, int number) { __builtin_prefetch(piece + 64 * number, 0, 2); }
    // All that is left, for groups with many rows and few products.
    void rest() {
        while (at_ < n_) {
            const char* piece = next();
            for (int i = 0; i < 4; ++i) line(piece, i);
        }
    }

   private:
    static constexpr int64_t PIECE = 256;
    std::vector<const char*> queue_;
    int64_t n_, at_;
};

// Σ_k a[r][k · step] · b[k][v] for R rows and K vectors, handed to `to`.
template <class T, int R, int K, class A, class B, class To>
inline void tile(const A& a, int64_t row, int64_t step, const B& b, int64_t column, int64_t inner, const To& to,
                 Prefetch& prefetch) {
    constexpr int W = Simd<T>::W;
    Vec<T> sum[R][K];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < K; ++v) sum[r][v] = Vec<T>{};
    const T* rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = a(row + r);
    const auto add = [&](int64_t k) {
        const T* from = b(k) + column;
        Vec<T> x[K];
#pragma GCC unroll 8
        for (int v = 0; v < K; ++v) x[v] = load(from + v * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vec<T> y = fill(rows[r][k * step]);
#pragma GCC unroll 8
            for (int v = 0; v < K; ++v) sum[r][v] += y * x[v];
        }
    };
    int64_t k = 0;
    if (!prefetch.empty())
        for (; k + 4 <= inner; k += 4) {
            const char* piece = prefetch.next();
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) add(k + i), Prefetch::line(piece, i);
        }
    for (; k < inner; ++k) add(k);
    to(row, column, sum);
}

template <class T, int R, class A, class B, class To>
inline void tile_of(int vectors, const A& a, int64_t row, int64_t step, const B& b, int64_t column, int64_t inner,
                    const To& to, Prefetch& prefetch) {
    switch (vectors) {
        case 1: return tile<T, R, 1>(a, row, step, b, column, inner, to, prefetch);
        case 2: return tile<T, R, 2>(a, row, step, b, column, inner, to, prefetch);
#if SMYRF_REGISTERS >= 32
        case 3: return tile<T, R, 3>(a, row, step, b, column, inner, to, prefetch);
        default: return tile<T, R, 4>(a, row, step, b, column, inner, to, prefetch);
#endif
    }
}

// a · b, rows × columns; `columns` is a multiple of a vector. Row r of a is read at a(r)[k · step].
template <class T, class A, class B, class To>
void product(const A& a, int64_t rows, int64_t step, const B& b, int64_t columns, int64_t inner, const To& to,
             Prefetch& prefetch) {
    constexpr int W = Simd<T>::W;
    for (int64_t column = 0; column < columns; column += TILE_VECTORS * W) {
        const int vectors = static_cast<int>(std::min<int64_t>(TILE_VECTORS, (columns - column) / W));
        for (int64_t r = 0; r < rows; r += TILE_ROWS) {
            switch (std::min<int64_t>(TILE_ROWS, rows - r)) {
                case 1: tile_of<T, 1>(vectors, a, r, step, b, column, inner, to, prefetch); break;
                case 2: tile_of<T, 2>(vectors, a, r, step, b, column, inner, to, prefetch); break;
                case 3: tile_of<T, 3>(vectors, a, r, step, b, column, inner, to, prefetch); break;
                case 4: tile_of<T, 4>(vectors, a, r, step, b, column, inner, to, prefetch); break;
                case 5: tile_of<T, 5>(vectors, a, r, step, b, column, inner, to, prefetch); break;
                default: tile_of<T, 6>(vectors, a, r, step, b, column, inner, to, prefetch);
            }
        }
    }
}

constexpr int I = 64;  // columns of a packed block

// Rows side by side: to[d][i] = factor · rows[i][d], zero where a row is null; `to` has rows of I.
template <class T>
void pack_columns(const T* const* rows, int64_t n, int64_t width, T factor, T* to) {
    constexpr int W = Simd<T>::W;
    for (int64_t i = 0; i < n; i += W) {
        int64_t d = 0;
        for (; d + W <= width; d += W) {
            Vec<T> x[W];
            for (int r = 0; r < W; ++r) {
                const T* row = i + r < n ? rows[i + r] : nullptr;
                x[r] = row ? load(row + d) * factor : Vec<T>{};
            }
            transpose<T>(x);
            for (int r = 0; r < W; ++r) store(to + (d + r) * I + i, x[r]);
        }
        for (; d < width; ++d)
            for (int r = 0; r < W; ++r) {
                const T* row = i + r < n ? rows[i + r] : nullptr;
                to[d * I + i + r] = row ? row[d] * factor : T(0);
            }
    }
}

// Memory of one thread, kept from call to call.
template <class T>
class Buffer {
   public:
    T* get(int64_t n) {
        if (n > size_) {
            std::free(data_);
            size_ = n;
            data_ = static_cast<T*>(std::aligned_alloc(64, round_up(n * sizeof(T), 64)));
            if (data_ == nullptr) size_ = 0, throw std::bad_alloc();
        }
        return data_;
    }
    // Gives back what only a very long sequence needs.
    void trim() {
        constexpr int64_t MOST = 1 << 24;  // bytes
        if (size_ * static_cast<int64_t>(sizeof(T)) <= MOST) return;
        std::free(data_);
        data_ = nullptr, size_ = 0;
    }
    ~Buffer() { std::free(data_); }

   private:
    T* data_ = nullptr;
    int64_t size_ = 0;
};

// Rows that can be read by whole vectors: as they are where the width allows it, else copies, filled up with zeros.
// A null row is a row of zeros. `list` has room for n pointers.
template <class T>
Listed<T> whole_vectors(const T* const* rows, int64_t n, int64_t width, const T** list, Buffer<T>& copies) {
    constexpr int W = Simd<T>::W;
    const int64_t padded = round_up(width, W);
    const bool copy = padded != width;
    T* to = copies.get(padded * (copy ? n + 1 : 1));
    const T* zeros = to;
    std::memset(to, 0, padded * sizeof(T));
    for (int64_t i = 0; i < n; ++i) {
        list[i] = rows[i] == nullptr ? zeros : rows[i];
        if (!copy || rows[i] == nullptr) continue;
        to += padded;
        list[i] = to;
        std::memcpy(to, rows[i], width * sizeof(T));
        for (int64_t d = width; d < padded; ++d) to[d] = T(0);
    }
    return {list};
}

// What is done at the end of a block, also when something is thrown.
template <class Work>
class Finally {
   public:
    explicit Finally(const Work& work) : work_(work) {}
    ~Finally() { work_(); }

   private:
    Work work_;
};

// Runs `work(task)` for all tasks, in their order as far as several threads do. What one of them throws is thrown when all
// have ended: those that wait for it must not wait for ever.
template <class Work>
void run(int64_t n_tasks, int threads, const Work& work) {
    std::atomic<int64_t> next{0};
    std::exception_ptr thrown;
    const int team = static_cast<int>(std::min<int64_t>(threads, n_tasks));
    if (team <= 1) {
        for (int64_t task = 0; task < n_tasks; ++task) work(task);
        return;
    }
#pragma omp parallel num_threads(team)
    for (int64_t task = next++; task < n_tasks; task = next++) {
        try {
            work(task);
        } catch (...) {
#pragma omp critical(smyrf_thrown)
            thrown = std::current_exception();
        }
    }
    if (thrown) std::rethrow_exception(thrown);
}
