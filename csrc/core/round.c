/* round.c - which units stay, and which stream; see round.h. */
#include "round.h"

#include <float.h>

/* What chose them: see planning.h. */
enum {
    /* Quarters of one, which is as large as the largest unit. With whole ones FLUX.2 copied 2 to 4%
     * more, as two slots were taken where one and a half would do. */
    OO_SLOT = 4,
    /* A ring where no seconds are known. First sweeps: 1.051 with 2, 1.060 with 8. */
    OO_SLOTS = 4,
    /* That are tried. Fourteen take 10,000 units 0.6 to 3.9 ms, as a ring that is enough ends it.
     */
    OO_RINGS = 14,
    /* Of units, of which each is tried as the largest one that streams: of 250 cells of sampling 25
     * are beyond 1.02, and 43 where a ring always holds the largest unit. */
    OO_SIZES = 4,
    /* Of the link, that are tried after the first: Newton's steps. flux1 with 91% offloaded takes
     * 1.005 of the bound, and 1.034 without them. One is as good in the cells there. */
    OO_RATES = 4,
    /* After so many a round takes as long as the one before it: 2 and 6 change no cell. */
    OO_LAPS = 3
};
static const size_t oo__quarters[OO_RINGS] = {4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 30, 36, 42, 48};

/* Whether it stays in any case: it is kept, or larger than those that may stream. */
static int oo__must_stay(const struct oo_turn *turn, size_t largest) {
    return turn->kept || turn->must > 0 || (!turn->must && turn->bytes > largest);
}

/* Whether it streams in any case. */
static int oo__must_stream(const struct oo_turn *turn) { return !turn->kept && turn->must < 0; }

static int oo__is_far(const struct oo_turn *turn) { return turn->far > 0; }

/* What the link brings in the time that it takes. */
static double oo__weight(const struct oo_turn *turn) {
    return (double)turn->bytes * (oo__is_far(turn) ? turn->far : 1);
}

double oo_round_copies_s(const struct oo_turn *turns, size_t count, double link_bps) {
    double ways[2] = {0, 0};
    for (size_t i = 0; i < count; i++)
        ways[oo__is_far(&turns[i])] += turns[i].stays ? 0 : oo__weight(&turns[i]);
    return (ways[0] > ways[1] ? ways[0] : ways[1]) / link_bps;
}

/* What is on a disk stays if there is room for all of it, and for the largest of the others to
 * stream; if not, all others stream. */
static void oo__divide(struct oo_turn *turns, size_t count, size_t room) {
    size_t needed = 0, largest = 0;
    int any = 0;
    for (size_t i = 0; i < count; i++) {
        const int is_far = oo__is_far(&turns[i]);
        any |= is_far;
        if (is_far || turns[i].kept)
            needed += turns[i].bytes;
        else if (turns[i].bytes > largest)
            largest = turns[i].bytes;
    }
    const int fits = needed + largest <= room;
    for (size_t i = 0; i < count; i++)
        turns[i].must = any && oo__is_far(&turns[i]) == fits ? (fits ? 1 : -1) : 0;
}

/* Bytes of those that do. */
static size_t oo__held(const struct oo_turn *turns, size_t count, size_t largest) {
    size_t held = 0;
    for (size_t i = 0; i < count; i++)
        held += oo__must_stay(&turns[i], largest) ? turns[i].bytes : 0;
    return held;
}

/* How fast the link brings what streams. A share is a byte of those that may, or a second of the
 * round. */
struct oo_rate {
    double bytes;    /* for each share */
    double ahead;    /* so many can arrive before they are used */
    double busy;     /* shares in which the link does not rest */
    double short_of; /* bytes that should stay at some time, and find no room */
};

/* Which units stay in `room`: those that do in any case, and of the others as many as the link
 * cannot bring in time. Returns the bytes that stay. */
static size_t oo__stay(struct oo_turn *turns, size_t count, size_t largest, size_t room,
                       struct oo_rate *rate) {
    double owed = 0;
    size_t held = oo__held(turns, count, largest);
    rate->short_of = 0;
    rate->busy = 0;
    for (size_t i = 0; i < count; i++) {
        const double bytes = (double)turns[i].bytes;
        owed -= rate->bytes * turns[i].share; /* streams at this time */
        if (owed < -rate->ahead)
            owed = -rate->ahead;
        else
            rate->busy += turns[i].share;
        turns[i].stays = oo__must_stay(&turns[i], largest);
        if (turns[i].stays || oo__must_stream(&turns[i]))
            continue;
        owed += bytes;
        if (owed < bytes / 2)
            continue;
        turns[i].stays = turns[i].bytes <= room - held;
        if (turns[i].stays) {
            owed -= bytes;
            held += turns[i].bytes;
        } else if (owed > rate->short_of) {
            rate->short_of = owed;
        }
    }
    return held;
}

/* Which units stay in `room`, spread so that the link has as much to do for each byte of those that
 * may stream, or for each second of the round. A part of it may need so much that not all that
 * should stay has room: then the link brings more at any time, until what does is spread over all
 * of that part (Newton's method: what is missing falls with the rate, ever more slowly). Returns
 * the bytes that stay. */
static size_t oo__spread(struct oo_turn *turns, size_t count, size_t largest, size_t room,
                         size_t ring, int by_seconds) {
    size_t total = 0;
    double shares = 0;
    for (size_t i = 0; i < count; i++) {
        const int is_free = !oo__must_stay(&turns[i], largest) && !oo__must_stream(&turns[i]);
        turns[i].share = by_seconds ? turns[i].seconds : is_free ? (double)turns[i].bytes : 0;
        shares += turns[i].share;
        total += oo__must_stream(&turns[i]) ? 0 : turns[i].bytes;
    }
    struct oo_rate rate = {.bytes = total > room ? (double)(total - room) / shares : 0,
                           .ahead = by_seconds ? (double)ring : DBL_MAX};
    size_t held = 0;
    for (int i = 0; i <= OO_RATES; i++) {
        held = oo__stay(turns, count, largest, room, &rate);
        if (rate.short_of <= (double)largest)
            break;
        rate.bytes += rate.short_of / rate.busy;
    }
    if (!by_seconds)
        return held;
    for (size_t i = 0; i < count; i++) /* what is left over */
        if (!turns[i].stays && !oo__must_stream(&turns[i]) && turns[i].bytes <= room - held) {
            turns[i].stays = 1;
            held += turns[i].bytes;
        }
    return held;
}

static int oo__goes_first(const struct oo_turn *turn, const struct oo_turn *other) {
    return turn->bytes != other->bytes ? turn->bytes > other->bytes : turn->unit < other->unit;
}

size_t oo_round_first(const struct oo_turn *turns, size_t count) {
    size_t first = count;
    double seconds = 0;
    int alike = 1;
    for (size_t i = 0; i < count; i++)
        seconds += turns[i].seconds;
    for (size_t i = 0; i < count; i++) {
        if (turns[i].stays)
            continue;
        alike = alike && (first == count || turns[i].bytes == turns[first].bytes);
        if (first == count || (seconds > 0 && oo__goes_first(&turns[i], &turns[first])))
            first = i;
    }
    return alike ? count : first;
}

/* What is in the ring: each unit where the one before it ends, or from the begin. */
struct oo_ring {
    size_t bytes, used, position;
    const struct oo_turn *first;
    struct oo_turn *latest; /* has what is left over behind it until it is free */
};

/* Put the unit that is next where its turn is. 0: that is still in use. */
static int oo__put(struct oo_ring *ring, struct oo_turn *turn) {
    const size_t left = ring->bytes - ring->position;
    const int fits = turn->bytes <= left && turn != ring->first;
    const size_t over = fits || !ring->used ? 0 : left;
    if (turn->bytes + over > ring->bytes - ring->used)
        return 0;
    if (over)
        ring->latest->taken += over;
    turn->taken = turn->bytes;
    ring->used += turn->bytes + over;
    ring->position = (fits ? ring->position : 0) + turn->bytes;
    ring->latest = turn;
    return 1;
}

/* A copy begins when the one before it, of link or disk, has ended and what was in its place has
 * been used. */
double oo_round_seconds(struct oo_turn *turns, size_t count, size_t ring, double link_bps) {
    double computed = 0, ways[2] = {0, 0}, begin = 0;
    struct oo_ring lies = {.bytes = ring, .first = turns + oo_round_first(turns, count)};
    for (size_t now = 0, ahead = 0; now < OO_LAPS * count; now++) {
        struct oo_turn *turn = &turns[now % count];
        if (now % count == 0)
            begin = computed;
        for (; ahead < now + count; ahead++) {
            struct oo_turn *next = &turns[ahead % count];
            if (next->stays)
                continue;
            if (!oo__put(&lies, next))
                break;
            double *copied = &ways[oo__is_far(next)];
            *copied = (*copied > computed ? *copied : computed) + oo__weight(next) / link_bps;
            next->arrives = *copied;
        }
        if (ahead == now)
            return DBL_MAX; /* the ring does not hold it */
        if (!turn->stays) {
            computed = computed > turn->arrives ? computed : turn->arrives;
            lies.used -= turn->taken;
        }
        computed += turn->seconds;
    }
    return computed - begin;
}

/* The largest of those that may stream and are smaller than `bytes`; 0: there is none, or one that
 * has to stream is larger. */
static size_t oo__next_size(const struct oo_turn *turns, size_t count, size_t bytes) {
    size_t next = 0;
    for (size_t i = 0; i < count; i++) {
        if (bytes != SIZE_MAX && oo__must_stream(&turns[i]) && turns[i].bytes >= bytes)
            return 0;
        if (!turns[i].kept && turns[i].must <= 0 && turns[i].bytes < bytes && turns[i].bytes > next)
            next = turns[i].bytes;
    }
    return next;
}

/* A ring of so many quarters of a slot; the largest is all that is left. */
static size_t oo__ring(size_t quarters, size_t slot, size_t left) {
    const size_t ring = quarters * slot / OO_SLOT;
    return ring < left ? ring : left;
}

/* One of the ways to go: units of up to `slot` bytes stream through `ring` bytes. */
struct oo_way {
    size_t slot, ring, held;
    int by_seconds;
    double seconds;
};

static size_t oo__go(struct oo_turn *turns, size_t count, size_t room, const struct oo_way *way) {
    return oo__spread(turns, count, way->slot, room - way->ring, way->ring, way->by_seconds);
}

/* Of all that cost hardly any time, the one that leaves most to those that stay. A slot of a ring
 * holds the largest unit that streams: where larger ones stay, the ring is smaller. */
static size_t oo__settle(struct oo_turn *turns, size_t count, size_t room, double link_bps,
                         int alone) {
    struct oo_way ways[2 * OO_SIZES * OO_RINGS] = {{0}}, *end = ways;
    size_t slot = oo__next_size(turns, count, SIZE_MAX), held = oo__held(turns, count, slot);
    double least = DBL_MAX, kernels_s = 0;
    for (size_t i = 0; i < count; i++)
        kernels_s += turns[i].seconds;
    for (int kind = 0; kind < 2 * OO_SIZES; kind++) {
        for (int i = 0; i < OO_RINGS && (alone || kind % 2 == 0); i++) {
            if (!alone && oo__quarters[i] % OO_SLOT)
                continue; /* from whole slots training finds back sooner */
            const size_t ring = oo__ring(oo__quarters[i], slot, room - held);
            *end = (struct oo_way){.slot = slot, .ring = ring, .by_seconds = kind % 2};
            end->held = oo__go(turns, count, room, end);
            const double copies_s = oo_round_copies_s(turns, count, link_bps);
            if (copies_s > oo_round_nearly(least)) /* and more with a larger ring */
                break;
            end->seconds = oo_round_seconds(turns, count, room - end->held, link_bps);
            const double bound_s = copies_s > kernels_s ? copies_s : kernels_s;
            const int is_enough = end->seconds <= oo_round_nearly(bound_s);
            const double possible_s = is_enough ? bound_s : end->seconds;
            least = possible_s < least ? possible_s : least;
            end++;
            if (is_enough) /* what a larger ring could save is next to nothing */
                break;
        }
        if (kind % 2 == 0)
            continue;
        slot = oo__next_size(turns, count, slot);
        held = oo__held(turns, count, slot);
        if (!slot || held + slot > room) /* no size is left, or all would stay */
            break;
    }
    const struct oo_way *best = ways;
    while (best->seconds > oo_round_nearly(least)) /* one of them is the least */
        best++;
    for (const struct oo_way *way = best; way < end; way++)
        if (way->seconds <= oo_round_nearly(least) && way->held > best->held)
            best = way;
    return oo__go(turns, count, room, best);
}

size_t oo_round_settle(struct oo_turn *turns, size_t count, size_t room, double link_bps,
                       int alone) {
    size_t total = 0;
    double seconds = 0;
    for (size_t i = 0; i < count; i++) {
        seconds += turns[i].seconds;
        total += turns[i].bytes;
    }
    if (total <= room) {
        for (size_t i = 0; i < count; i++)
            turns[i].stays = 1;
        return total;
    }
    oo__divide(turns, count, room);
    if (link_bps > 0 && seconds > 0)
        return oo__settle(turns, count, room, link_bps, alone);
    const size_t slot = oo__next_size(turns, count, SIZE_MAX);
    const size_t left = room - oo__held(turns, count, slot);
    const size_t ring = oo__ring((size_t)OO_SLOTS * OO_SLOT, slot, left);
    return oo__spread(turns, count, slot, room - ring, ring, 0);
}
