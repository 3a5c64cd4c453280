// One level of Tangent attention (smyrf/tangent/levels.py): clusters score their candidates, keep the best and fold the
// others. Included once per instruction set, inside its namespace.
//
// Scores are computed twice, a block at a time, rather than kept: first to find the best, then to fold the rest.

// Which lanes of a comparison are true, as bits.
template <class T>
inline uint32_t lanes(typename Simd<T>::I found) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        return _mm512_movepi32_mask((__m512i)found);
    else
        return _mm512_movepi64_mask((__m512i)found);
#elif defined(__AVX__)
    if constexpr (sizeof(T) == 4)
        return static_cast<uint32_t>(_mm256_movemask_ps((__m256)found));
    else
        return static_cast<uint32_t>(_mm256_movemask_pd((__m256d)found));
#else
    uint32_t bits = 0;
    for (int i = 0; i < Simd<T>::W; ++i) bits |= (found[i] != 0 ? 1u : 0u) << i;
    return bits;
#endif
}

// The clusters of one block (columns) and the candidates of the cluster above them (rows).
template <class T>
class Block {
   public:
    Block(const Level<T>& level, int64_t above, int64_t first, int64_t n)
        : level_(level), above_(above), first_(first), n_(n), columns_(round_up(n, Simd<T>::W)),
          mine_(Scratch<T>::mine()) {
        mine_.prefetch.clear();
        const T* rows[I];
        for (int64_t i = 0; i < n; ++i) {
            rows[i] = level.centroids + cluster(i) * level.width;
            spread_[i] = 3 * T(LOG2_E) * level.spread[cluster(i)];
        }
        for (int64_t i = n; i < columns_; ++i) spread_[i] = 0;
        packed_ = mine_.queries.get(level.width * I);
        pack_columns(rows, n, level.width, T(LOG2_E), packed_);
        scores_ = mine_.scores.get(J * I);
        keys_ = mine_.lists[0].get(J);
    }

    void run() {
        choose();
        fold();
    }

   private:
    static constexpr size_t MOST_HITS = 1 << 14;

    struct Hit {
        T rank;
        int32_t place;
    };

    int64_t cluster(int64_t i) const { return above_ * level_.fan + first_ + i; }
    int64_t key(int64_t place) const {
        return level_.candidates == nullptr ? above_ * level_.n_candidates + place
                                            : level_.candidates[above_ * level_.n_candidates + place];
    }

    // Scores of candidates place(0) … place(n − 1), in base 2, without masks.
    template <class Place>
    void score(int64_t n, const Place& place) {
        for (int64_t j = 0; j < n; ++j) keys_[j] = level_.vectors + key(place(j)) * (level_.width + level_.value_width);
        product<T>(Listed<T>{keys_}, n, 1, Strided<T>{packed_, I}, columns_, level_.width, Store<T>{scores_, I},
                   mine_.prefetch);
    }

    // How much a key may matter: T + 3σ + ½ log ‖v − v̄‖²; its own cluster's keys before all others, masked ones last.
    void rank(int64_t place, T* scores) const {
        constexpr int W = Simd<T>::W;
        const T infinity = std::numeric_limits<T>::infinity();
        const int64_t which = key(place);
        if (level_.hidden != nullptr && level_.hidden[which]) {
            for (int64_t i = 0; i < columns_; i += W) store(scores + i, fill(-infinity));
            return;
        }
        const T spread = level_.key_spread[which], weight = T(LOG2_E) * level_.weight[which];
        for (int64_t i = 0; i < columns_; i += W) store(scores + i, load(scores + i) + load(spread_ + i) * spread + weight);
        if (level_.leaves_of_own == 0) return;
        const int64_t own = level_.branch[which] / level_.leaves_of_own - above_ * level_.fan % level_.n_clusters - first_;
        if (own >= 0 && own < n_ && scores[own] != -infinity) scores[own] = infinity;
    }

    // A bound that probably somewhat more candidates reach than a cluster keeps, from a sample.
    void find_bounds(T* bounds) {
        const T infinity = std::numeric_limits<T>::infinity();
        const double expected = static_cast<double>(level_.n_near) * J / level_.n_candidates;
        const int64_t at = static_cast<int64_t>(expected + 3 * std::sqrt(expected) + 2);
        std::fill(bounds, bounds + I, -infinity);
        if (level_.n_candidates < 4 * J || at >= J) return;
        const auto place = [&](int64_t j) { return j * level_.n_candidates / J; };
        score(J, place);
        for (int64_t j = 0; j < J; ++j) rank(place(j), scores_ + j * I);
        T sample[J];
        for (int64_t i = 0; i < n_; ++i) {
            for (int64_t j = 0; j < J; ++j) sample[j] = known(scores_[j * I + i]);
            std::nth_element(sample, sample + at, sample + J, std::greater<T>());
            bounds[i] = sample[at];
        }
        std::fill(bounds + n_, bounds + I, infinity);
    }

    // What is not a number is larger than all that are.
    static T known(T x) { return x == x ? x : std::numeric_limits<T>::infinity(); }

    // Candidates that reach the bounds, in their order.
    void collect(const T* bounds) {
        constexpr int W = Simd<T>::W;
        const int64_t most = block_size(level_.n_candidates, J);
        for (int64_t start = 0; start < level_.n_candidates; start += most) {
            const int64_t size = std::min(most, level_.n_candidates - start);
            score(size, [&](int64_t j) { return start + j; });
            for (int64_t j = 0; j < size; ++j) {
                T* scores = scores_ + j * I;
                rank(start + j, scores);
                for (int64_t i = 0; i < columns_; i += W)
                    for (uint32_t found = ~lanes<T>(load(scores + i) < load(bounds + i)) & all_lanes(i); found != 0;
                         found &= found - 1) {
                        const int64_t column = i + __builtin_ctz(found);
                        hits()[column].push_back({known(scores[column]), static_cast<int32_t>(start + j)});
                    }
            }
        }
    }
    uint32_t all_lanes(int64_t i) const {
        const int64_t n = std::min<int64_t>(Simd<T>::W, n_ - i);
        return n <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1;
    }
    static std::vector<Hit>* hits() {
        static thread_local std::vector<Hit> all[I];
        return all;
    }

    // Writes the ascending places of the best candidates of each cluster.
    void choose() {
        const int64_t n_near = level_.n_near;
        if (n_near >= level_.n_candidates) {
            for (int64_t i = 0; i < n_; ++i)
                for (int64_t s = 0; s < n_near; ++s) level_.kept[cluster(i) * n_near + s] = s;
            return;
        }
        alignas(64) T bounds[I];
        for (int64_t i = 0; i < I; ++i) hits()[i].clear();
        find_bounds(bounds);
        collect(bounds);
        bool again = false;  // a sample that was not like the rest
        for (int64_t i = 0; i < n_; ++i) {
            const bool enough = static_cast<int64_t>(hits()[i].size()) >= n_near;
            bounds[i] = (enough ? 1 : -1) * std::numeric_limits<T>::infinity();
            if (!enough) hits()[i].clear();
            again |= !enough;
        }
        if (again) collect_missing(bounds);
        for (int64_t i = 0; i < n_; ++i) {
            const std::vector<Hit>& found = hits()[i];
            ranks().resize(found.size());
            for (size_t j = 0; j < found.size(); ++j) ranks()[j] = found[j].rank;
            std::nth_element(ranks().begin(), ranks().begin() + (n_near - 1), ranks().end(), std::greater<T>());
            const T last = ranks()[n_near - 1];
            int64_t n_equal = std::count(ranks().begin(), ranks().begin() + n_near, last);  // of these the first are kept
            int64_t* to = level_.kept + cluster(i) * n_near;
            for (const Hit& hit : found)
                if (hit.rank > last || (hit.rank == last && n_equal-- > 0)) *to++ = hit.place;
            if (hits()[i].capacity() > MOST_HITS) std::vector<Hit>().swap(hits()[i]);  // ties, which are rare
        }
    }
    static std::vector<T>& ranks() {
        static thread_local std::vector<T> all;
        return all;
    }
    // All candidates of the clusters whose bound is -inf; those that have enough already find nothing more.
    void collect_missing(const T* bounds) {
        std::vector<Hit> before[I];
        for (int64_t i = 0; i < n_; ++i)
            if (bounds[i] > 0) before[i].swap(hits()[i]);
        collect(bounds);
        for (int64_t i = 0; i < n_; ++i)
            if (bounds[i] > 0) before[i].swap(hits()[i]);
    }

    // Far keys: each run of the candidates that are not kept, as one key with a bias and a value.
    void fold() {
        constexpr int W = Simd<T>::W;
        const int64_t n_far = level_.n_far, both = level_.width + level_.value_width;
        const T infinity = std::numeric_limits<T>::infinity();
        alignas(64) T top[I], sum[I], keep[I], share[I], state[2 * I];
        int32_t identity[I];
        int64_t next[I];  // the first kept candidate that was not met yet
        T* rows[I];
        for (int64_t i = 0; i < I; ++i) identity[i] = static_cast<int32_t>(i), next[i] = 0;
        for (int64_t f = 0; f < n_far; ++f) {
            const int64_t begin = f * level_.n_candidates / n_far, end = (f + 1) * level_.n_candidates / n_far;
            for (int64_t i = 0; i < n_; ++i) {
                rows[i] = level_.far + (cluster(i) * n_far + f) * both;
                state[2 * i] = -infinity, state[2 * i + 1] = 0;
            }
            const int64_t most = block_size(end - begin, J);
            for (int64_t start = begin; start < end; start += most) {
                const int64_t size = std::min(most, end - start);
                score(size, [&](int64_t j) { return start + j; });
                if (level_.hidden != nullptr)
                    for (int64_t j = 0; j < size; ++j)
                        if (level_.hidden[key(start + j)]) std::fill(scores_ + j * I, scores_ + (j + 1) * I, -infinity);
                for (int64_t i = 0; i < n_; ++i) {
                    const int64_t* kept = level_.kept + cluster(i) * level_.n_near;
                    for (; next[i] < level_.n_near && kept[next[i]] < start + size; ++next[i])
                        scores_[(kept[next[i]] - start) * I + i] = -infinity;
                }
                softmax<T>(scores_, size, columns_, top, sum);
                merge_shares<T>(identity, n_, n_, top, sum, state, keep, share);
                const Listed<T> vectors = whole_vectors(keys_, size, both, mine_.lists[1].get(J), mine_.values);
                product<T>(Strided<T>{scores_, 1}, n_, I, vectors, round_up(both, W), size,
                           Into<T>{rows, keep, share, both}, mine_.prefetch);
            }
            for (int64_t i = 0; i < n_; ++i) {
                if (state[2 * i + 1] == T(0)) std::fill(rows[i], rows[i] + both, T(0));
                const T at_centroid = dot(level_.centroids + cluster(i) * level_.width, rows[i], level_.width);
                level_.bias[cluster(i) * n_far + f] = state[2 * i] * T(LN_2) + std::log(state[2 * i + 1]) - at_centroid;
            }
        }
    }

    const Level<T>& level_;
    int64_t above_, first_, n_, columns_;
    Scratch<T>& mine_;
    T *packed_, *scores_;
    const T** keys_;
    alignas(64) T spread_[I];
};

template <class T>
void fold_level(const Level<T>& level) {
    const int64_t blocks = (level.fan + I - 1) / I;
    run(level.n_above * blocks, level.threads, [&](int64_t task) {
        const int64_t first = task % blocks * I;
        Block<T>(level, task / blocks, first, std::min<int64_t>(I, level.fan - first)).run();
    });
}
