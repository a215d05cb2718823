/* Who stays through a round, and who streams: against all the choices there are in small rounds. */
#include "check.h"
#include "round.h"

#include <stdlib.h>

enum { MOST = 4096, LINK_BPS = 1000 };

static struct oo_turn turns[MOST];

static size_t held_by(size_t count) {
    size_t held = 0;
    for (size_t i = 0; i < count; i++)
        held += turns[i].stays ? turns[i].bytes : 0;
    return held;
}

/* Seconds of a settled round with slots of one size, step by step: a copy waits for the copy before
 * it, and for the use of the unit that had its slot. */
static double seconds_of(size_t count, unsigned stays, size_t slots) {
    double used[64] = {0}, gpu = 0, link = 0, begin = 0;
    size_t streamed = 0; /* uses of streamed units so far */
    double arrives[64] = {0};
    size_t fetched = 0, at = 0; /* copies so far, and the turn that comes next for a copy */
    for (size_t lap = 0; lap < 6; lap++) {
        begin = gpu;
        for (size_t i = 0; i < count; i++) {
            while (fetched < streamed + slots && at < (lap + 1) * count + i) {
                const struct oo_turn *turn = &turns[at++ % count];
                if (stays >> (turn - turns) & 1)
                    continue;
                const double free = fetched < slots ? 0 : used[(fetched - slots) % 64];
                link = (link > free ? link : free) + (double)turn->bytes / LINK_BPS;
                arrives[fetched++ % 64] = link;
            }
            const int here = (int)(stays >> i & 1);
            if (!here && arrives[streamed % 64] > gpu)
                gpu = arrives[streamed % 64];
            gpu += turns[i].seconds;
            if (!here)
                used[streamed++ % 64] = gpu;
        }
    }
    return gpu - begin;
}

/* Units of one size, few of them: what is spread evenly over the bytes cannot always suit seconds
 * that are not. */
CASE(test_hardly_any_choice_is_faster) {
    double sum = 0, worst = 1;
    for (unsigned seed = 1; seed <= 300; seed++) {
        srand(seed);
        const size_t count = 4 + (size_t)rand() % 7, bytes = 100;
        const size_t room = 2 + (size_t)rand() % (count - 3);
        static const double choices[] = {0.02, 0.05, 0.1, 0.2};
        for (size_t i = 0; i < count; i++)
            turns[i] = (struct oo_turn){.bytes = bytes, .seconds = choices[rand() % 4]};
        double best = 1e9;
        for (unsigned stays = 0; stays < 1u << count; stays++) {
            size_t n = 0;
            for (size_t i = 0; i < count; i++)
                n += stays >> i & 1;
            if (n >= room)
                continue;
            const double seconds = seconds_of(count, stays, room - n);
            best = seconds < best ? seconds : best;
        }
        const size_t held = oo_round_settle(turns, count, room * bytes, LINK_BPS, 1);
        unsigned chosen = 0;
        for (size_t i = 0; i < count; i++)
            chosen |= (unsigned)turns[i].stays << i;
        CHECK(held == held_by(count) && held < room * bytes, "seed %u: %zu bytes stay", seed, held);
        const double seconds = seconds_of(count, chosen, room - held / bytes);
        worst = seconds / best > worst ? seconds / best : worst;
        sum += seconds / best;
        CHECK(seconds <= best * 1.15, "seed %u: %zu units, room for %zu: %.4f s, best %.4f", seed,
              count, room, seconds, best);
    }
    printf("%.4f of the best on average, at worst %.4f\n", sum / 300, worst);
    CHECK(sum / 300 <= 1.01, "%.4f of the best on average", sum / 300);
}

/* Seconds of the third of three rounds, byte by byte: a copy waits for the use of all that are in
 * its place, which begins where the last one ended, or at 0: what would go beyond the ring and, of
 * units of different sizes, the largest. */
static double lying_seconds(size_t count, size_t ring) {
    struct {
        size_t begin, end;
        double arrives;
    } lies[64];
    double gpu = 0, link = 0, begin = 0;
    size_t fetched = 0, used = 0, position = 0, ahead = 0, first = count;
    int differ = 0, known = 0;
    for (size_t i = 0; i < count; i++)
        known |= turns[i].seconds > 0;
    for (size_t i = 0; i < count; i++)
        if (!turns[i].stays &&
            (first == count || (known && (turns[i].bytes > turns[first].bytes ||
                                          (turns[i].bytes == turns[first].bytes &&
                                           turns[i].unit < turns[first].unit)))))
            first = i;
    for (size_t i = 0; i < count; i++)
        differ |= !turns[i].stays && turns[i].bytes != turns[first].bytes;
    CHECK(oo_round_first(turns, count) == (differ ? first : count), "%zu is the first", first);
    for (size_t now = 0; now < 3 * count; now++) {
        begin = now % count ? begin : gpu;
        for (; ahead < now + count; ahead++) {
            const struct oo_turn *turn = &turns[ahead % count];
            if (turn->stays)
                continue;
            const int begins = (differ && ahead % count == first) || position + turn->bytes > ring;
            const size_t at = begins ? 0 : position;
            int is_free = 1;
            for (size_t i = used; i < fetched; i++)
                is_free &= lies[i % 64].end <= at || at + turn->bytes <= lies[i % 64].begin;
            if (!is_free)
                break;
            link = (link > gpu ? link : gpu) + (double)turn->bytes / LINK_BPS;
            position = lies[fetched % 64].end = at + turn->bytes;
            lies[fetched % 64].begin = at;
            lies[fetched++ % 64].arrives = link;
        }
        const struct oo_turn *turn = &turns[now % count];
        if (!turn->stays) {
            gpu = gpu > lies[used % 64].arrives ? gpu : lies[used % 64].arrives;
            used++;
        }
        gpu += turn->seconds;
    }
    return gpu - begin;
}

CASE(test_a_ring_has_an_end) {
    int full = 0;
    for (unsigned seed = 1; seed <= 1000; seed++) {
        srand(seed);
        const size_t count = 3 + (size_t)rand() % 12, ring = 100 * (4 + (size_t)rand() % 9);
        for (size_t i = 0; i < count; i++)
            turns[i] = (struct oo_turn){.unit = (uint32_t)((i + seed) % count),
                                        .bytes = 100 * (1 + (size_t)rand() % 4),
                                        .seconds = 0.1 * (rand() % 8),
                                        .stays = rand() % 4 == 0};
        for (size_t i = 0; seed % 10 == 0 && i < count; i++)
            turns[i].seconds = 0;
        const double expected = lying_seconds(count, ring);
        const double found = oo_round_seconds(turns, count, ring, LINK_BPS);
        CHECK(found < expected + 1e-9 && found > expected - 1e-9,
              "seed %u: %.3f s, lying side by side %.3f", seed, found, expected);
        full += expected > 0;
    }
    CHECK(full > 900, "only %d rounds take time", full);
}

static size_t settle_alike(size_t count, size_t bytes, double seconds, size_t room, double bps) {
    for (size_t i = 0; i < count; i++)
        turns[i] = (struct oo_turn){.bytes = bytes, .seconds = seconds};
    return oo_round_settle(turns, count, room, bps, 1);
}

CASE(test_the_ring_is_no_larger_than_the_seconds_ask_for) {
    /* A kernel takes as long as three copies: one slot is filled while the kernel of a unit that
     * stays runs. Where a copy takes as long as three kernels, more slots hide those kernels. */
    CHECK(settle_alike(100, 100, 0.3, 6000, LINK_BPS) == 5900, "one slot where kernels are slow");
    const size_t fast = settle_alike(100, 100, 0.03, 6000, LINK_BPS);
    CHECK(fast < 5900 && fast >= 4800, "%zu bytes stay where the link is slow", fast);
    CHECK(settle_alike(100, 100, 0.3, 6000, 0) == 5600, "four slots where nothing is known");
    CHECK(settle_alike(100, 100, 0, 6000, LINK_BPS) == 5600, "likewise, but for the link's speed");
    CHECK(settle_alike(100, 100, 0.3, 300, 0) == 0, "all of a room of three slots is a ring");
    CHECK(settle_alike(100, 100, 0.3, 300, LINK_BPS) <= 200, "likewise, but for what can stay");
}

/* A ring of one and a half slots holds a large unit and a small one, which is as good as two slots
 * for units that take turns. Between training steps a ring has whole slots. */
CASE(test_a_ring_may_end_within_a_slot) {
    for (int alone = 0; alone <= 1; alone++) {
        for (size_t i = 0; i < 60; i++)
            turns[i] = (struct oo_turn){.bytes = i % 2 ? 50 : 100, .seconds = 0.15};
        const size_t held = oo_round_settle(turns, 60, 2000, LINK_BPS, alone);
        CHECK(held == (alone ? 1850 : 1800), "alone %d: %zu bytes stay", alone, held);
    }
}

/* The ring is all of the room where a smaller one would let a unit stay, and cost seconds. */
CASE(test_a_ring_of_all_the_room) {
    for (size_t i = 0; i < 60; i++) {
        const size_t bytes = i % 6 ? 40 : 100;
        turns[i] = (struct oo_turn){.bytes = bytes, .seconds = (double)bytes / LINK_BPS};
    }
    const size_t held = oo_round_settle(turns, 60, 220, LINK_BPS, 1);
    const double seconds = oo_round_seconds(turns, 60, 220 - held, LINK_BPS);
    for (size_t i = 0; i < 60; i++)
        turns[i].stays = 0;
    const double streamed = oo_round_seconds(turns, 60, 220, LINK_BPS);
    CHECK(held == 0 && seconds == streamed, "%zu bytes stay: %.3f s, else %.3f", held, seconds,
          streamed);
}

/* Those that are kept stay, and of the others as many as else, spread evenly over these. */
CASE(test_those_that_are_kept_stay) {
    (void)settle_alike(100, 100, 0.3, 4000, LINK_BPS);
    for (size_t i = 0; i < 100; i++)
        turns[i].kept = i >= 70;
    const size_t stays = oo_round_settle(turns, 100, 6000, LINK_BPS, 1);
    CHECK(stays == 5800 && held_by(100) == stays, "%zu bytes stay, not all but two slots", stays);
    size_t streak = 0;
    for (size_t i = 0; i < 100; i++) {
        CHECK(turns[i].stays || !turns[i].kept, "unit %zu is kept", i);
        streak = turns[i].stays && !turns[i].kept ? streak + 1 : 0;
        CHECK(streak <= 1, "of 70 others 28 stay, %zu of them next to unit %zu", streak, i);
    }
    for (size_t i = 0; i < 100; i++)
        turns[i].kept = i >= 50;
    CHECK(oo_round_settle(turns, 100, 10000, LINK_BPS, 1) == 10000, "all fit");
    CHECK(held_by(100) == 10000, "%zu bytes stay", held_by(100));
    /* A ring has no slot for one that is kept. */
    for (size_t i = 0; i < 200; i++)
        turns[i] = (struct oo_turn){.bytes = i % 5 ? 40 : 100, .kept = i % 5 == 0};
    const size_t beside = oo_round_settle(turns, 200, 8000, 0, 1);
    CHECK(beside > 8000 - 5 * 40 && beside <= 8000 - 4 * 40, "%zu bytes stay", beside);
}

/* Units of two sizes, a large one after every four: where all of the large ones can stay at no cost
 * of time, the ring is for small ones, and not a byte larger than a slot and what is too little for
 * one more to stay. */
CASE(test_the_largest_stay_where_a_smaller_ring_will_do) {
    for (size_t i = 0; i < 200; i++)
        turns[i] = (struct oo_turn){.bytes = i % 5 ? 40 : 100, .seconds = 0.3};
    const size_t held = oo_round_settle(turns, 200, 8000, LINK_BPS, 1);
    CHECK(held == held_by(200) && held > 8000 - 2 * 40, "%zu bytes stay", held);
    for (size_t i = 0; i < 200; i += 5)
        CHECK(turns[i].stays, "unit %zu streams", i);
    CHECK(oo_round_settle(turns, 200, 4080, LINK_BPS, 1) == 4000, "they alone stay");
    CHECK(oo_round_settle(turns, 200, 4039, LINK_BPS, 1) <= 3939,
          "no room for a ring next to them");
}

/* The small ones are used first, and the link cannot bring so many as fast as they are used. */
CASE(test_the_largest_stream_where_the_link_would_rest_else) {
    for (size_t i = 0; i < 200; i++)
        turns[i] = (struct oo_turn){.bytes = i < 100 ? 40 : 100, .seconds = 0.01};
    const size_t held = oo_round_settle(turns, 200, 11000, LINK_BPS, 1);
    const double seconds = oo_round_seconds(turns, 200, 11000 - held, LINK_BPS);
    size_t large = 0;
    for (size_t i = 100; i < 200; i++)
        large += turns[i].stays ? 1 : 0;
    CHECK(large < 90, "%zu of 100 large ones stay", large);
    for (size_t i = 0; i < 200; i++)
        turns[i].stays = i >= 100 || i % 40 == 0;
    CHECK(seconds < 0.9 * oo_round_seconds(turns, 200, 800, LINK_BPS), "%.3f s", seconds);
}

/* Half of the units are computed with in a tenth of the time: few of these stream, and the link
 * brings the others while it can. */
CASE(test_the_link_has_as_much_to_do_at_any_time) {
    for (size_t i = 0; i < 200; i++)
        turns[i] = (struct oo_turn){.bytes = 100, .seconds = i < 100 ? 0.02 : 0.2};
    const size_t held = oo_round_settle(turns, 200, 10000, LINK_BPS, 1);
    const double seconds = oo_round_seconds(turns, 200, 10000 - held, LINK_BPS);
    CHECK(seconds < 22 * 1.005, "%.3f s, of kernels 22", seconds);
    CHECK(held >= 9600, "%zu bytes stay", held);
    const size_t even = oo_round_settle(turns, 200, 10000, LINK_BPS, 0);
    CHECK(even <= 9100, "%zu bytes stay where training comes after", even);
}

/* Half of the units need more of the link than it gives, and more of them should stay than there is
 * room for: those that do are spread over them, so that the link keeps up. */
CASE(test_what_room_there_is_goes_to_all_that_need_it) {
    for (size_t i = 0; i < 200; i++)
        turns[i] = (struct oo_turn){.bytes = 100, .seconds = i < 100 ? 0.07 : 0.3};
    const size_t held = oo_round_settle(turns, 200, 4000, LINK_BPS, 1);
    const double seconds = oo_round_seconds(turns, 200, 4000 - held, LINK_BPS);
    CHECK(seconds < 37 * 1.005, "%.3f s, of kernels 37", seconds);
    CHECK(held >= 3400, "%zu bytes stay", held);
    size_t early = 0, late = 0;
    for (size_t i = 0; i < 100; i++)
        *(i < 50 ? &early : &late) += turns[i].stays ? 1 : 0;
    CHECK(early + late >= 30 && early <= late + 5 && late <= early + 5, "%zu and %zu stay", early,
          late);
}

/* What is left over is given to those that stream: hardly a place for one of them is. */
CASE(test_hardly_any_room_is_left_over) {
    for (unsigned seed = 1; seed <= 50; seed++) {
        size_t total = 0;
        srand(seed);
        for (size_t i = 0; i < 200; i++) {
            turns[i] = (struct oo_turn){.bytes = 50 * (1 + (size_t)rand() % 4),
                                        .seconds = (i < 100 ? 0.02 : 0.2) * (1 + rand() % 4)};
            total += turns[i].bytes;
        }
        const size_t room = total / 10 * (1 + (size_t)rand() % 9);
        const size_t held = oo_round_settle(turns, 200, room, LINK_BPS, 1);
        CHECK(held == held_by(200) && held < room && held + 13 * 200 > room,
              "seed %u: %zu of %zu bytes stay, by count %zu", seed, held, room, held_by(200));
    }
}

CASE(test_all_stay_where_there_is_room) {
    CHECK(settle_alike(100, 100, 0.1, 10000, LINK_BPS) == 10000, "it fits exactly");
    CHECK(settle_alike(100, 100, 0.1, 20000, 0) == 10000, "it fits");
    CHECK(settle_alike(100, 100, 0.1, 9999, LINK_BPS) < 10000, "it does not fit");
}

/* Two of three are on a disk, a fifth as fast as the link. */
static void settle_far(size_t count, double seconds) {
    for (size_t i = 0; i < count; i++)
        turns[i] =
            (struct oo_turn){.bytes = 100, .seconds = seconds, .far = i % 3 ? 5.0 : 0, .kept = 0};
}

CASE(test_what_is_on_a_disk_stays_first) {
    static const double seconds[] = {0, 0.02, 0.3, 2};
    for (size_t s = 0; s < 4; s++) {
        settle_far(300, seconds[s]);
        const size_t held = oo_round_settle(turns, 300, 9000, LINK_BPS, 1);
        size_t far[3] = {0};
        for (size_t i = 0; i < 300; i++) {
            CHECK(!turns[i].stays || turns[i].far > 0, "unit %zu is in memory, and stays", i);
            far[i / 100] += turns[i].stays ? 1 : 0;
        }
        CHECK(held == held_by(300) && held >= 8600, "%zu bytes stay", held);
        for (size_t i = 0; i < 3; i++)
            CHECK(far[i] + 3 >= held / 300 && far[i] <= held / 300 + 3, "%zu stay in a third",
                  far[i]);
    }
}

/* Where all of them stay, others do in what is left, which has a slot for those that stream. */
CASE(test_all_that_is_on_a_disk_stays_if_it_fits) {
    static const size_t rooms[] = {20100, 20150, 21000, 26000};
    for (size_t s = 0; s < 4; s++) {
        settle_far(300, 0.3);
        const size_t held = oo_round_settle(turns, 300, rooms[s], LINK_BPS, 1);
        for (size_t i = 0; i < 300; i++)
            CHECK(turns[i].stays || turns[i].far <= 0, "unit %zu is read from the disk", i);
        CHECK(held <= rooms[s] - 100 && held >= rooms[s] - 400, "%zu of %zu bytes stay", held,
              rooms[s]);
    }
    settle_far(300, 0.3);
    const size_t held = oo_round_settle(turns, 300, 20099, LINK_BPS, 1);
    CHECK(held >= 19600 && held < 20000, "%zu bytes stay", held);
}

/* A ring holds what has to stream, however large that is. */
CASE(test_a_ring_holds_the_largest_in_memory) {
    for (size_t i = 0; i < 300; i++)
        turns[i] =
            (struct oo_turn){.bytes = i % 3 ? 40 : 100, .seconds = 0.3, .far = i % 3 ? 5.0 : 0};
    const size_t held = oo_round_settle(turns, 300, 4000, LINK_BPS, 1);
    CHECK(held == held_by(300) && held <= 3900 && held >= 3500, "%zu bytes stay", held);
    CHECK(oo_round_seconds(turns, 300, 4000 - held, LINK_BPS) < 1e6, "one has no place");
}

/* Link and disk work side by side. */
CASE(test_link_and_disk_take_the_longer_of_the_two) {
    settle_far(300, 0);
    CHECK(oo_round_copies_s(turns, 300, LINK_BPS) == 200 * 0.5, "the disk takes longer");
    const double seconds = oo_round_seconds(turns, 300, 1000, LINK_BPS);
    CHECK(seconds >= 100 && seconds < 101, "%.3f s", seconds);
    for (size_t i = 0; i < 300; i++)
        turns[i].stays = i % 3 != 0;
    CHECK(oo_round_copies_s(turns, 300, LINK_BPS) == 100 * 0.1, "the link does");
}

CASE(test_those_that_stay_are_spread_evenly) {
    for (unsigned seed = 1; seed <= 50; seed++) {
        size_t total = 0, largest = 0, before = 0, held = 0;
        srand(seed);
        for (size_t i = 0; i < MOST; i++) {
            turns[i] = (struct oo_turn){.bytes = 1 + (size_t)(rand() % 1000), .seconds = 0.1};
            total += turns[i].bytes;
            largest = turns[i].bytes > largest ? turns[i].bytes : largest;
        }
        const size_t room = total / 10 * (1 + (size_t)rand() % 9);
        const size_t stays = oo_round_settle(turns, MOST, room, 0, 1);
        CHECK(stays <= room - 4 * largest && stays + 6 * largest > room, "seed %u: %zu of %zu",
              seed, stays, room);
        for (size_t i = 0; i < MOST; i++) {
            before += turns[i].bytes;
            held += turns[i].stays ? turns[i].bytes : 0;
            const double share = (double)before * (double)stays / (double)total;
            CHECK((double)held > share - 3 * (double)largest &&
                      (double)held < share + 3 * (double)largest,
                  "seed %u: of the first %zu bytes %zu stay", seed, before, held);
        }
    }
}

CHECK_MAIN(NULL)
