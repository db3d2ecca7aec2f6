"""Which form of the kernels runs: shapes of blocks, pieces of sequences, kernels of the backward pass, groups of heads.

Everything here follows from static shapes. A block of the recurrent kernels owns a multiprocessor for as many steps as
its sequence has chunks, so few heads times sequences leave a card idle. Two ways out, one after the other: blocks of 64
value columns, for all heads, in a last round (`whole_heads`) or for the longest sequences (`halves`), and cutting
sequences into pieces (jax_qla/kernels/summaries.py), which costs a summary of every piece but the last. A model of a
few measured numbers weighs them.

What is decided of a call, in this order:

1. Pieces. `piece_rows` says how a forward pass by itself is cut. Where gradients are wanted, `kept_rows` says how both
   passes are, and where that is None each is cut for itself, the backward pass by `backward_rows`. A shard of a
   sequence must be summarised anyway, and is always cut: `shard_cut`. A packed batch is cut only if one of its
   sequences is longer than `cut_beyond_in_both`, where operands are split `cut_beyond`, or, in a forward pass by itself
   whose pieces nobody asked for, `cut_beyond_alone`, which the device finds out.
2. Blocks. `value_tile`, `whole_heads`, `halves`, `composed` and the others of blocks.py say what a block computes.
3. Kernels and memory of the backward pass. `head_groups` says how many groups of heads are computed one after another,
   and by which kernels, for which it asks `in_one`; `balance` is what the device goes by where these depend on the
   lengths of packed sequences. `composed_first` says in which order they begin.

The files, each of which imports only those above it:

| file | what it has |
|---|---|
| overrides.py | what the environment has it choose |
| card.py | how many blocks run at once, and what fills the card |
| batches.py | a batch by its shapes, and the lengths that its sequences are supposed to have |
| costs.py | **the cost model**: measured constants, and microseconds of each kernel by its blocks |
| blocks.py | shapes of blocks |
| one_kernel.py | whether one kernel computes the backward pass |
| forward_time.py | microseconds of a forward pass by its pieces; which packed sequences are cut |
| few_places.py | the same of few packed sequences, where the pass is by itself |
| backward_time.py | microseconds of a backward pass by its pieces |
| uneven.py | pieces of both passes, and which batches are cut, where sequences would fill the card if they were alike |
| pieces.py | rows of pieces |
| groups.py | groups of heads |

Who wants another choice has `piece_rows` of `chunk_gated_delta_rule`, and of the environment `JAX_QLA_PIECE_ROWS`,
`JAX_QLA_HEAD_GROUPS` and `JAX_QLA_IN_ONE` (overrides.py). What was measured is in
docs/performance_policy.md; tests/test_policy.py holds the choices to it.
"""

from jax_qla.policy.batches import if_alike
from jax_qla.policy.blocks import (
    NO_HALVES,
    Composed,
    Halves,
    Summarised,
    composed,
    gradients_in_place,
    halves,
    key_heads_together,
    measured_by_forward,
    neighbours,
    prepared_together,
    room_for_both,
    summarised,
    value_tile,
    whole_heads,
)
from jax_qla.policy.card import MORE_THAN_HALF, MULTIPROCESSORS
from jax_qla.policy.few_places import cut_beyond_alone
from jax_qla.policy.forward_time import ASKED_AMONG, cut_beyond
from jax_qla.policy.groups import HeadGroups, head_groups
from jax_qla.policy.one_kernel import Balance, InOne, balance, in_one, in_one_width
from jax_qla.policy.overrides import (
    GROUPS_OVERRIDE,
    IN_ONE_OVERRIDE,
    OVERRIDE,
    groups_override,
    in_one_override,
    rows_override,
)
from jax_qla.policy.pieces import Cut, backward_rows, kept_rows, piece_rows, shard_cut, wanted_rows
from jax_qla.policy.uneven import composed_first, cut_beyond_in_both

__all__ = [
    "ASKED_AMONG",
    "GROUPS_OVERRIDE",
    "IN_ONE_OVERRIDE",
    "MORE_THAN_HALF",
    "MULTIPROCESSORS",
    "NO_HALVES",
    "OVERRIDE",
    "Balance",
    "Composed",
    "Cut",
    "Halves",
    "HeadGroups",
    "InOne",
    "Summarised",
    "backward_rows",
    "balance",
    "composed",
    "composed_first",
    "cut_beyond",
    "cut_beyond_alone",
    "cut_beyond_in_both",
    "gradients_in_place",
    "groups_override",
    "halves",
    "head_groups",
    "if_alike",
    "in_one",
    "in_one_override",
    "in_one_width",
    "kept_rows",
    "key_heads_together",
    "measured_by_forward",
    "neighbours",
    "piece_rows",
    "prepared_together",
    "room_for_both",
    "rows_override",
    "shard_cut",
    "summarised",
    "value_tile",
    "wanted_rows",
    "whole_heads",
]
