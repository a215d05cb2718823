/* stays.c - which units stay while samples stream: where there is a round, whether to spread those
 * that stay, and what training takes over. Which stay in one round is in round.c. */
#include "planning.h"

/* What chose them: see planning.h. Of samples between training steps: more are no interruption.
 * Of the previews there (4 and 30 samples; FLUX.1 and SDXL) 64 makes samples take
 * 1.268 of the bound, not 1.149, and the first step after them 1.150, not 1.103; 2 changes none. */
enum { OO_MANY_ROUNDS = 8 };
/* Of samples alone, at least: an image takes about as many. With 8 time is 1.0170, with 32
 * 1.0167, with 128 1.0157. */
enum { OO_ROUNDS_TO_COME = 32 };
/* Of the arena: training goes around one at least. The second step after the previews' samples
 * takes 1.047 of the bound with 2, 1.031 with 6, 1.027 with 12, and samples 1.152, 1.149 and 1.148.
 * More than two models have not been tried. */
enum { OO_SHARES = 6 };
/* In which all of a round are measured, at most: 256 can be open. With 3 the slowest cell
 * takes 1.062 of the bound, not 1.044; 12 change no cell. */
enum { OO_MEASURED_ROUNDS = 6 };

/* Seconds of a forward where none were measured: as many a byte as the others take. */
static void oo__guess_seconds(struct oo_turn *turns, size_t count) {
    double seconds = 0, bytes = 0;
    for (size_t i = 0; i < count; i++) {
        seconds += turns[i].seconds;
        bytes += turns[i].seconds > 0 ? (double)turns[i].bytes : 0;
    }
    for (size_t i = 0; i < count && bytes > 0; i++)
        if (turns[i].seconds <= 0)
            turns[i].seconds = (double)turns[i].bytes * seconds / bytes;
}

/* The units of the round that begins after the match, in order of use. Returns how many; 0 where
 * most visits are of units that have been met: rounds within a round, of which these are the ones
 * that count. */
static size_t oo__turns(struct oo_plan *plan, uint64_t visits) {
    size_t count = 0, again = 0;
    const double link_bps = oo_plan_link_bps(plan), disk_bps = oo__disk_bps(plan);
    const double farther = link_bps > 0 && disk_bps > 0 ? link_bps / disk_bps : 1;
    plan->marks++;
    for (uint64_t i = plan->match + 1; i <= plan->match + visits; i++) {
        const struct oo_trace_entry *visit = oo__visit_at(plan, i);
        const struct oo_plan_unit *unit = oo__first_met(plan, i);
        if (unit)
            plan->turns[count++] = (struct oo_turn){.unit = visit->unit,
                                                    .bytes = unit->bytes,
                                                    .seconds = unit->seconds,
                                                    .far = unit->far ? farther : 0};
        else if (visit->previous + 1 != i && ++again > count)
            return 0;
    }
    return count;
}

/* Mark those that have a place in the arena. */
static void oo__mark_laid(struct oo_plan *plan, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const struct oo_plan_unit *unit = &plan->units[plan->turns[i].unit];
        plan->turns[i].stays =
            unit->round == plan->rounds.number && unit->round_place != OO_IN_RING;
        plan->turns[i].kept = 0;
    }
}

/* Each round begins with it, in front of the ring. */
static void oo__find_first(struct oo_plan *plan, size_t count) {
    oo__mark_laid(plan, count);
    const size_t first = oo_round_first(plan->turns, count);
    plan->rounds.first = first < count ? plan->turns[first].unit : OO_NO_UNIT;
}

/* The link's speed, by which rounds are laid; the disk's, where that alone is known. 0: without
 * seconds. */
static double oo__round_bps(const struct oo_plan *plan) {
    const double link_bps = oo_plan_link_bps(plan);
    return !plan->rounds.timed ? 0 : link_bps > 0 ? link_bps : oo__disk_bps(plan);
}

/* A ring that is larger than the seconds ask for, as they are known by now, costs bytes: in what it
 * can leave, some that stream stay. Those that stay are not moved. */
static void oo__lay_more(struct oo_plan *plan, size_t count, size_t room) {
    struct oo_rounds *rounds = &plan->rounds;
    const double bps = oo__round_bps(plan);
    if (bps <= 0 || rounds->ring >= room)
        return;
    oo__mark_laid(plan, count);
    for (size_t i = 0; i < count; i++)
        plan->turns[i].kept = plan->turns[i].stays;
    const double as_is = oo_round_seconds(plan->turns, count, room - rounds->ring, bps);
    const size_t held = oo_round_settle(plan->turns, count, room, bps, !rounds->between);
    if (oo_round_seconds(plan->turns, count, room - held, bps) <= oo_round_nearly(as_is))
        rounds->ring = oo__lay_from(plan, rounds->ring, count);
    rounds->cursor = rounds->cursor > rounds->ring ? rounds->cursor : rounds->ring;
    oo__find_first(plan, count);
}

/* Whether rounds of those that are spread in `room` take so much less than with the present places
 * that this pays for what has to move: as many bytes as the arena holds, `times` over. Where
 * seconds are new and show that kernels take all the time, so that the link can move it meanwhile,
 * it is enough that a round copies less. */
static int oo__spread_pays(struct oo_plan *plan, size_t count, size_t ring, size_t room,
                           int times) {
    const struct oo_rounds *rounds = &plan->rounds;
    uint64_t number = rounds->count > rounds->before ? rounds->count : rounds->before;
    const double bps = oo__round_bps(plan);
    double kernels_s = 0, farthest = 1;
    if (bps <= 0)
        return 1;
    if (!rounds->between && number < OO_ROUNDS_TO_COME)
        number = OO_ROUNDS_TO_COME;
    oo__mark_laid(plan, count);
    for (size_t i = 0; i < count; i++) {
        kernels_s += plan->turns[i].seconds;
        farthest = plan->turns[i].far > farthest ? plan->turns[i].far : farthest;
    }
    const double moved_s = (double)plan->arena.total_bytes * farthest / bps;
    const double as_is_copies_s = oo_round_copies_s(plan->turns, count, bps);
    const double as_is = oo_round_seconds(plan->turns, count, plan->arena.total_bytes - ring, bps);
    const size_t held = oo_round_settle(plan->turns, count, room, bps, !rounds->between);
    const double spread = oo_round_seconds(plan->turns, count, room - held, bps);
    return (rounds->newly_timed && spread <= oo_round_nearly(kernels_s) &&
            as_is_copies_s > oo_round_nearly(oo_round_copies_s(plan->turns, count, bps))) ||
           (as_is > oo_round_nearly(spread) && (as_is - spread) * (double)number > times * moved_s);
}

/* Where a segment ends, what does not fit into it begins in the next one. */
static size_t oo__room_of_round(const struct oo_plan *plan, size_t largest) {
    size_t lost = 0;
    for (const struct oo_segment *s = plan->arena.segments; s && s->next; s = s->next)
        lost += largest;
    return plan->arena.total_bytes > lost ? plan->arena.total_bytes - lost : 0;
}

/* Give each unit of the round that begins after the match a place; `spread`: that is decided. Those
 * of a round that `is_laid` keep theirs unless others pay. Where the arena holds all of them, none
 * needs one. 0: it is none. */
static int oo__lay_round(struct oo_plan *plan, uint64_t visits, int is_laid, int spread) {
    struct oo_rounds *rounds = &plan->rounds;
    size_t total = 0, largest = 0;
    const size_t count = oo__turns(plan, visits);
    for (size_t i = 0; i < count; i++) {
        total += plan->turns[i].bytes;
        largest = plan->turns[i].bytes > largest ? plan->turns[i].bytes : largest;
    }
    if (!count)
        return 0;
    const size_t room = oo__room_of_round(plan, largest);
    oo__guess_seconds(plan->turns, count);
    if (is_laid && rounds->spread) {
        oo__lay_more(plan, count, room);
        if (!oo__spread_pays(plan, count, rounds->ring, room, 1))
            return 1;
    }
    rounds->number++;
    if (plan->tape_floor) { /* of those that were spread before: no training came to settle */
        plan->tape_floor = 0;
        plan->tape_layout = OO_NOWHERE;
    }
    rounds->length = visits;
    rounds->layout = plan->arena.layout;
    rounds->spread = 0;
    for (size_t i = 0; i < count; i++) {
        struct oo_plan_unit *unit = &plan->units[plan->turns[i].unit];
        unit->round = rounds->number;
        unit->round_place = total <= plan->arena.total_bytes ? OO_ANYWHERE : OO_IN_RING;
    }
    if (total <= plan->arena.total_bytes)
        return 1;
    rounds->ring = oo__lay_as_is(plan, largest);
    /* There, and back to where training wants them. */
    rounds->spread =
        spread || (rounds->many && oo__spread_pays(plan, count, rounds->ring, room, 2));
    if (rounds->spread) {
        (void)oo_round_settle(plan->turns, count, room, oo__round_bps(plan), !rounds->between);
        rounds->ring = oo__lay_from(plan, 0, count);
    }
    rounds->cursor = rounds->ring;
    oo__find_first(plan, count);
    return 1;
}

/* Training after samples: those that are spread stay where they are, but for the last of them, and
 * the tape of all others goes around what is behind: two blocks at least. */
static void oo__settle(struct oo_plan *plan) {
    const size_t total = plan->arena.total_bytes, blocks = 2 * plan->block_bytes;
    const size_t room = blocks > total / OO_SHARES ? blocks : total / OO_SHARES;
    plan->tape_floor = 0;
    plan->tape_layout = OO_NOWHERE;
    for (uint32_t i = 0; plan->rounds.spread && i < plan->n_units; i++) {
        const struct oo_plan_unit *unit = &plan->units[i];
        const size_t end = unit->round_place + unit->bytes;
        if (unit->round == plan->rounds.number && unit->round_place < plan->rounds.ring &&
            end + room <= total && end > plan->tape_floor)
            plan->tape_floor = end;
    }
}

void oo__end_rounds(struct oo_plan *plan) {
    struct oo_rounds *rounds = &plan->rounds;
    rounds->before = rounds->count;
    /* A unit that is used twice makes a first forward look like two rounds. */
    rounds->over = rounds->between || (rounds->spread && rounds->count > 1);
    rounds->spread_over = rounds->over && rounds->spread;
    rounds->last = 1;
    if (rounds->over)
        oo__settle(plan);
}

void oo__end_step(struct oo_plan *plan) {
    struct oo_rounds *rounds = &plan->rounds;
    if (rounds->over && plan->arena.total_bytes - plan->tape_floor < 2 * plan->block_bytes)
        oo__settle(plan);
    if (rounds->over || plan->relaid)
        plan->misplaced = 0;
    plan->relaid = 0;
    rounds->over = rounds->spread_over = 0;
}

/* How often there have been as many rounds as are many, doubled each time: which units stay is
 * decided again then, with the seconds that are known by then. 0: too few. */
static int oo__many(const struct oo_rounds *rounds) {
    int many = 0;
    for (uint64_t n = rounds->count > rounds->before ? rounds->count : rounds->before;
         n > OO_MANY_ROUNDS; n /= 2)
        many++;
    return many;
}

void oo__learn_round(struct oo_plan *plan) {
    struct oo_rounds *rounds = &plan->rounds;
    const struct oo_trace_entry *current = oo__visit_at(plan, plan->now - 1);
    const int was_on = rounds->on;
    rounds->on = 0;
    if (!oo__remembered(plan, plan->match))
        return;
    uint64_t last = plan->match; /* of the unit's visits in a row, one for each member */
    while (oo__visit_at(plan, last)->next == last + 1)
        last++;
    const uint64_t next = oo__visit_at(plan, last)->next, visits = next - plan->match;
    if (next == OO_NOWHERE)
        return;
    rounds->between = current->forwards < plan->now;
    rounds->on = visits < oo__visit_at(plan, next)->forwards && visits < current->forwards;
    if (!rounds->on)
        return;
    const int is_laid =
        plan->units[current->unit].round == rounds->number && rounds->layout == plan->arena.layout;
    rounds->count = (current->forwards - 1) / (is_laid ? rounds->length : visits);
    const int many = oo__many(rounds);
    /* Of samples alone some units may not have been measured yet, where anything is. */
    const int is_timed = (is_laid && rounds->timed) || rounds->between ||
                         rounds->count >= OO_MEASURED_ROUNDS || oo__all_are_timed(plan, current);
    if (is_laid && many == rounds->many && is_timed == rounds->timed && (rounds->spread || was_on))
        return;
    rounds->newly_timed = is_laid && !rounds->between && is_timed && !rounds->timed;
    rounds->timed = is_timed;
    rounds->many = many;
    rounds->on =
        oo__lay_round(plan, visits, is_laid, !rounds->between || (was_on && rounds->spread));
}
