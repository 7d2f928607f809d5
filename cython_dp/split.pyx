"""Compiled exact split of the layers over stages; the readable twin is ``cython_dp.reference.split``."""

from libc.math cimport fabs, fmax
from libc.string cimport memset

from cython_dp._typedefs cimport float64_t, int32_t, int64_t
from cython_dp.problem cimport AGAIN
from cython_dp.schedule cimport NUM_KINDS

cdef float64_t BISECTION_WIDTH = 1e-5
cdef int MAX_BISECTIONS = 60
# Rounding may move an end by one comparison: windows of starts are a little wider than the limit asks.
cdef float64_t WINDOW_SLACK = 1.0 + 1e-9


cdef inline Stage stage_seconds(const FreeSplit* split, int rank, int x, int y, bint sharp) noexcept nogil:
    cdef Stage stage
    cdef int again = split.num_again if split.num_again < y - x else y - x
    stage.forward_s = split.forward_s[y] - split.forward_s[x]
    stage.backward_s = split.backward_s[y] - split.backward_s[x]
    if sharp:
        stage.backward_s += split.again_before[x + again] - split.again_before[x]
    else:
        stage.backward_s += split.again_s * again
    if rank == 0:
        stage.forward_s = stage.forward_s + split.first_f
        stage.backward_s = stage.backward_s + split.first_b
    if rank == split.p - 1:
        stage.forward_s = stage.forward_s + split.last_f
        stage.backward_s = stage.backward_s + split.last_b
    return stage


cdef float64_t path_seconds(const FreeSplit* split, int rank, int x, int y, bint sharp) noexcept nogil:
    cdef Stage stage = stage_seconds(split, rank, x, y, sharp)
    cdef float64_t f = stage.forward_s, b = stage.backward_s, head = 0.0, trip = 0.0, edges
    cdef int m = split.m, window = split.p - rank, cycles
    if rank > 0:
        head = split.forward_s[x] + split.backward_s[x] + split.first_f + split.first_b
        head += 2 * split.hop_s * rank
        if sharp:
            head += split.spread_before[x]
    if rank < split.p - 1:
        trip = split.forward_s[split.num_layers] - split.forward_s[y]
        trip += split.backward_s[split.num_layers] - split.backward_s[y]
        trip += split.last_f + split.last_b + 2 * split.hop_s * (split.p - 1 - rank)
        if sharp:
            trip += split.spread_after[y]
    if m <= window:
        return head + f + b + fmax((m - 1) * (f + b), trip + (m - 1) * fmax(f, b))
    edges = fmax((window - 1) * f, trip) + fmax((window - 1) * b, trip)
    cycles = (m - 1) // window
    return fmax(
        head + (m - window + 1) * (f + b) + edges,
        head + (1 + cycles) * trip + (m - cycles * (window - 1)) * (f + b),
    )


cdef float64_t work_seconds(const FreeSplit* split) noexcept nogil:
    cdef float64_t f = split.forward_s[split.num_layers] + split.first_f + split.last_f
    cdef float64_t b = split.backward_s[split.num_layers] + split.first_b + split.last_b
    cdef float64_t rest = (split.m - 1) * ((f + b) if split.m > split.p else fmax(f, b)) / split.p
    return f + b + rest + 2 * split.hop_s * (split.p - 1)


cdef float64_t ceiling_seconds(const FreeSplit* split) noexcept nogil:
    cdef float64_t f = split.forward_s[split.num_layers] + split.first_f + split.last_f
    cdef float64_t b = split.backward_s[split.num_layers] + split.first_b + split.last_b
    return (split.m + 4) * (f + b + split.again_before[split.num_layers] + 2 * split.hop_s * split.p)


cdef bint fill_latest(FreeSplit* split, float64_t limit_s) noexcept nogil:
    # The latest start of each rank, every earlier one taking all it may; whether the last layer is reached.
    cdef int rank, x, y = 0
    cdef const int32_t* reach
    for rank in range(split.p):
        x = y
        split.latest[rank] = x
        reach = split.reach + rank * (split.num_layers + 1)
        while y < reach[x] and path_seconds(split, rank, x, y + 1, False) <= limit_s:
            y += 1
    return y == split.num_layers


cdef bint fill_starts(FreeSplit* split, float64_t limit_s) noexcept nogil:
    # Ends grow with starts, so only starts up to the latest matter, down to where the next rank is missed.
    cdef int num_layers = split.num_layers, width = split.num_layers + 1, rank, x, y, nearest
    cdef const int32_t* reach
    cdef int32_t* farthest
    cdef char* starts
    split.starts[0] = False
    if not fill_latest(split, limit_s * WINDOW_SLACK):
        return False
    memset(split.starts, 0, (split.p + 1) * width)
    split.starts[split.p * width + num_layers] = True
    for rank in range(split.p - 1, -1, -1):
        reach = split.reach + rank * width
        farthest = split.farthest + rank * width
        starts = split.starts + rank * width
        nearest = width
        split.following[width] = width
        for x in range(num_layers, -1, -1):
            farthest[x] = -1
            if starts[width + x]:
                nearest = x
            split.following[x] = nearest
        y = num_layers
        for x in range(split.latest[rank], -1, -1):
            if y > reach[x]:
                y = reach[x]
            while y > x and path_seconds(split, rank, x, y, False) > limit_s:
                y -= 1
            if y < nearest:
                break
            if y >= x + split.least and path_seconds(split, rank, x, y, False) <= limit_s:
                farthest[x] = y
                starts[x] = split.following[x + split.least] <= y
        if nearest == width:
            return False
    return split.starts[0]


cdef void cheapest_kinds(const float64_t[::1] times, int* kinds) noexcept nogil:
    cdef int k, place
    for k in range(NUM_KINDS):
        place = k
        while place > 0 and times[AGAIN + k] < times[AGAIN + kinds[place - 1]]:
            kinds[place] = kinds[place - 1]
            place -= 1
        kinds[place] = k


cdef float64_t least_again(
    const int32_t* prefix, int width, const float64_t* again_s, const int* kinds, int x, int y, int64_t count
) noexcept nogil:
    cdef int number, k
    cdef int64_t layers
    cdef float64_t total = 0.0
    for number in range(NUM_KINDS):
        k = kinds[number]
        layers = prefix[k * width + y] - prefix[k * width + x]
        if count < layers:
            layers = count
        total += layers * again_s[k]
        count -= layers
    return total


cdef void fill_spread(FreeSplit* split) noexcept nogil:
    # What layers recompute at least when no stage holds more than the largest that `farthest` allows.
    cdef int num_layers = split.num_layers, width = split.num_layers + 1, rank, x, most = 1, full, count
    for rank in range(split.p):
        for x in range(width):
            if split.starts[rank * width + x] and split.farthest[rank * width + x] - x > most:
                most = split.farthest[rank * width + x] - x
    full = split.num_again if split.num_again < most else most
    for x in range(width):
        count = x // most * full
        count += full if full < x % most else x % most
        split.spread_before[x] = least_again(
            split.prefix, width, split.kind_again_s, split.kinds, 0, x, count
        )
        split.spread_after[num_layers - x] = least_again(
            split.prefix, width, split.kind_again_s, split.kinds, num_layers - x, num_layers, count
        )


cdef bint feasible(FreeSplit* split, float64_t limit_s) noexcept nogil:
    cdef int num_layers = split.num_layers, width = split.num_layers + 1, rank, x, y
    cdef int32_t* farthest
    cdef char* starts
    if not fill_starts(split, limit_s):
        return False
    if split.num_again == 0:
        return True
    # A start whose windows leave no end within the limit: which ends do is not an interval any more.
    fill_spread(split)
    for rank in range(split.p - 1, -1, -1):
        farthest = split.farthest + rank * width
        starts = split.starts + rank * width
        for x in range(num_layers + 1):
            if not starts[x]:
                continue
            starts[x] = False
            for y in range(x + split.least, farthest[x] + 1):
                if starts[width + y] and path_seconds(split, rank, x, y, True) <= limit_s:
                    starts[x] = True
                    break
    return split.starts[0]


cdef bint smallest_limit(
    FreeSplit* split, float64_t cutoff_s, float64_t* lower_s, float64_t* limit_s
) noexcept nogil:
    cdef float64_t low, high, middle
    cdef int _number
    if not feasible(split, cutoff_s):
        return False
    low = work_seconds(split)
    high = cutoff_s
    if low >= high or feasible(split, low):
        lower_s[0] = limit_s[0] = low if low < high else high
        return True
    for _number in range(MAX_BISECTIONS):
        if high - low <= BISECTION_WIDTH * high:
            break
        middle = 0.5 * (low + high)
        if feasible(split, middle):
            high = middle
        else:
            low = middle
    lower_s[0] = low
    limit_s[0] = high
    return True


cdef int nearest_share(const FreeSplit* split, int rank, int x, int low, int high) noexcept nogil:
    # The end in [low, high] whose stage comes closest to an equal share of the work that is left.
    cdef Stage stage = stage_seconds(split, rank, x, low, True)
    cdef float64_t left = split.forward_s[split.num_layers] - split.forward_s[x], share, distance
    cdef int y, best = low
    left += split.backward_s[split.num_layers] - split.backward_s[x] + split.last_f + split.last_b
    if rank == 0:
        left += split.first_f + split.first_b
    share = left / (split.p - rank)
    distance = fabs(stage.forward_s + stage.backward_s - share)
    for y in range(low + 1, high + 1):
        stage = stage_seconds(split, rank, x, y, True)
        if fabs(stage.forward_s + stage.backward_s - share) < distance:
            best = y
            distance = fabs(stage.forward_s + stage.backward_s - share)
    return best


cdef void first_split(FreeSplit* split, float64_t limit_s, int32_t* sizes) noexcept nogil:
    cdef int width = split.num_layers + 1, rank, x = 0, y, low, high, wanted, best, distance, best_distance
    feasible(split, limit_s)
    for rank in range(split.p):
        low = x + split.least
        high = split.farthest[rank * width + x]
        wanted = nearest_share(split, rank, x, low, high)
        best = -1
        best_distance = width
        for y in range(low, high + 1):
            distance = y - wanted if y > wanted else wanted - y
            if distance >= best_distance or not split.starts[(rank + 1) * width + y]:
                continue
            if path_seconds(split, rank, x, y, True) <= limit_s:
                best = y
                best_distance = distance
        sizes[rank] = best - x
        x = best
