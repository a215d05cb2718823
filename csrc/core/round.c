/* round.c - who stays, and who streams; see round.h. */
#include "round.h"

#include <float.h>

enum {
    OO_SLOTS = 4,       /* of the largest unit's size: a ring where no seconds are known */
    OO_MOST_SLOTS = 12, /* that are tried */
    OO_LAPS = 3         /* after so many a round takes as long as the one before it */
};
/* Who stays in `room` of those that are not kept, which have `total` bytes. Returns theirs. */
static size_t oo__spread(struct oo_turn *turns, size_t count, size_t total, size_t room) {
    double owed = 0;
    size_t held = 0;
    for (size_t i = 0; i < count; i++) {
        const double bytes = (double)turns[i].bytes;
        turns[i].stays = turns[i].kept;
        if (turns[i].kept)
            continue;
        owed += bytes * (double)room / (double)total;
        turns[i].stays = owed >= bytes / 2 && turns[i].bytes <= room - held;
        if (turns[i].stays) {
            owed -= bytes;
            held += turns[i].bytes;
        }
    }
    return held;
}

size_t oo_round_first(const struct oo_turn *turns, size_t count) {
    size_t first = count;
    for (size_t i = 0; i < count; i++) {
        if (turns[i].stays)
            continue;
        first = first < count ? first : i;
        if (turns[i].bytes != turns[first].bytes)
            return first;
    }
    return count;
}

/* What lies in the ring: each unit where the one before it ends, or from the begin. */
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

/* A copy begins when the one before it has ended and what lay in its place has been used. */
double oo_round_seconds(struct oo_turn *turns, size_t count, size_t ring, double link_bps) {
    double computed = 0, copied = 0, begin = 0;
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
            copied = (copied > computed ? copied : computed) + (double)next->bytes / link_bps;
            next->arrives = copied;
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

/* The smallest ring that costs hardly any time, in slots; the largest is all of the room. */
static size_t oo__enough(struct oo_turn *turns, size_t count, size_t total, size_t room,
                         size_t slot, double link_bps) {
    double seconds[OO_MOST_SLOTS + 1], least = DBL_MAX;
    for (size_t slots = 1; slots <= OO_MOST_SLOTS; slots++) {
        const size_t ring = slots * slot < room ? slots * slot : room;
        const size_t held = oo__spread(turns, count, total, room - ring);
        seconds[slots] = oo_round_seconds(turns, count, room - held, link_bps);
        least = seconds[slots] < least ? seconds[slots] : least;
    }
    size_t slots = 1;
    while (seconds[slots] > oo_round_nearly(least)) /* one of them is the least */
        slots++;
    return slots;
}

size_t oo_round_settle(struct oo_turn *turns, size_t count, size_t room, double link_bps) {
    size_t total = 0, largest = 0, kept = 0;
    double seconds = 0;
    for (size_t i = 0; i < count; i++) {
        seconds += turns[i].seconds;
        if (turns[i].kept) {
            kept += turns[i].bytes;
            continue;
        }
        total += turns[i].bytes;
        largest = turns[i].bytes > largest ? turns[i].bytes : largest;
    }
    room -= kept;
    if (total <= room)
        return kept + oo__spread(turns, count, total, total);
    const int known = link_bps > 0 && seconds > 0;
    const size_t slots =
        known ? oo__enough(turns, count, total, room, largest, link_bps) : OO_SLOTS;
    const size_t ring = slots * largest < room ? slots * largest : room;
    return kept + oo__spread(turns, count, total, room - ring);
}
