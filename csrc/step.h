// One token of every batch row through a whole pre-norm layer: the steps that layers/transformer_layer
// takes one by one, without returning to Python between them.

// Room that is handed out piece by piece, in lines of the cache.
struct Room {
    char* next;
    template <class T> T* take(int64_t count) {
        T* found = (T*)next;
        next += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
        return found;
    }
};

template <class T> void add_rows(const T* x, const T* h, int64_t count, T* y) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(load(x + i) + load(h + i), y + i);
    for (; i < count; ++i) round_to(to_float(x[i]) + to_float(h[i]), y + i);
}

// Rows without gaps; y may be x.
inline void norm_with(const Step& s, const NormWeight& n, const void* x, int64_t rows, int64_t dim,
                      void* y, int threads) {
    norm(Norm{s.dtype, x, rows, dim, dim, n.weight, n.eps, n.offset, y}, threads);
}

template <class T>
void product_with(const Step& s, const T* x, int64_t in_features, const Factor* factors, int count,
                  float* wide, T* y, int threads) {
    widen<T>(x, in_features, s.batch, in_features, wide);
    Product p{};
    p.dtype = s.dtype, p.x = wide, p.rows = s.batch, p.in_features = in_features, p.y = y;
    for (p.count = 0; p.count < count; ++p.count) {
        p.factors[p.count] = factors[p.count];
        p.y_stride += factors[p.count].out_features;
    }
    product(p, threads);
}

// Queries, keys and values of the new tokens; keys and values go to the end of the cache. Returns
// the queries, whose batch stride is q_batch.
template <class T>
const T* project(const Step& s, const T* x, float* wide, Room& room, int64_t& q_batch, int threads) {
    const int64_t H = s.heads, G = s.kv_heads, D = s.key_dim, V = s.value_dim;
    const int64_t width = (H + G) * D + G * V;
    T* qkv = room.take<T>(s.batch * width);
    product_with(s, x, s.embed_dim, s.qkv, 3, wide, qkv, threads);
    for (int64_t b = 0; b < s.batch; ++b) {
        T* row = qkv + b * width;
        if (s.q_norm.weight) norm_with(s, s.q_norm, row, H, D, row, 1);
        if (s.k_norm.weight) norm_with(s, s.k_norm, row + H * D, G, D, row + H * D, 1);
    }
    T* qk = qkv;
    q_batch = width;
    if (s.cos) {
        qk = room.take<T>(s.batch * (H + G) * D);
        q_batch = (H + G) * D;
        rotate(Rotation{s.dtype, qkv, s.batch, 1, H + G, D, width, width, D, s.cos, s.sin, qk}, threads);
    }
    const Piece& held = s.cache[s.pieces - 1];
    const int64_t last = held.length - 1;
    for (int64_t b = 0; b < s.batch; ++b)
        for (int64_t g = 0; g < G; ++g) {
            T* k = (T*)held.k + b * held.k_batch + g * held.k_head + last * held.k_token;
            T* v = (T*)held.v + b * held.v_batch + g * held.v_head + last * held.v_token;
            __builtin_memcpy(k, qk + b * q_batch + (H + g) * D, D * sizeof(T));
            __builtin_memcpy(v, qkv + b * width + (H + G) * D + g * V, V * sizeof(T));
        }
    return qk;
}

template <class T> Outcome step_of(const Step& s, int threads) {
    Room room{s.room};
    const int64_t E = s.embed_dim, features = s.batch * E, heads = s.heads * s.value_dim;
    const T* x = (const T*)s.x;
    T *h = room.take<T>(features), *sum = room.take<T>(features), *out = room.take<T>(s.batch * heads);
    float* wide = room.take<float>(s.batch * (E > heads ? E : heads));

    norm_with(s, s.attention_norm, x, s.batch, E, h, threads);
    Attention c{};
    c.dtype = s.dtype, c.batch = s.batch, c.heads = s.heads, c.kv_heads = s.kv_heads, c.queries = 1;
    c.key_dim = s.key_dim, c.value_dim = s.value_dim, c.scale = s.scale, c.softcap = s.softcap;
    c.q = (const char*)project(s, h, wide, room, c.q_batch, threads), c.q_head = c.q_token = s.key_dim;
    for (; c.count < s.pieces; ++c.count) {
        c.pieces[c.count] = s.cache[c.count];
        c.keys += s.cache[c.count].length;
    }
    c.out = (char*)out, c.out_batch = heads, c.out_head = c.out_query = s.value_dim;
    if (const Outcome outcome = attend(c, threads); outcome != Outcome::done) return outcome;
    product_with(s, out, heads, &s.out, 1, wide, h, threads);
    if (s.attention_out_norm.weight) norm_with(s, s.attention_out_norm, h, s.batch, E, h, threads);
    add_rows(x, h, features, sum);

    norm_with(s, s.feed_forward_norm, sum, s.batch, E, h, threads);
    widen<T>(h, E, s.batch, E, wide);
    FeedForward f{};
    f.dtype = s.dtype, f.x = wide, f.rows = s.batch, f.in_features = E, f.activation = s.activation;
    f.gate = s.gate, f.up = s.up, f.down = s.down, f.y = h;
    f.hidden = room.take<float>(s.batch * s.up.out_features);
    feed_forward(f, threads);
    if (s.feed_forward_out_norm.weight) norm_with(s, s.feed_forward_out_norm, h, s.batch, E, h, threads);
    add_rows(sum, h, features, (T*)s.y);
    return Outcome::done;
}
