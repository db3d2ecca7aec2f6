"""What a block of a kernel that goes through a sequence, or a piece of one, begins with: a state, or the gradient of one.

That of a sequence, and of the piece that it is entered by where it is cut (jax_qla/segments.py), is what the caller gives, or zero. That of any other piece
kernels/compose.py has found: it lies at the cut by which the piece is entered.
"""

from types import SimpleNamespace

from jax_qla.kernels.common import FIRST, LAST, cut_behind
from jax_qla.kernels.macros import kept_first


def macros():
    """The macros `find_source`, `begin_from` and both in one, `begin_with`, built on demand so that importing this needs no TileLang."""
    import tilelang.language as T

    @T.macro
    def find_source(source: T.Ref, of_piece: T.Ref, pieces, cut_pieces, n, kept):
        """Row of what segment n begins with, of what is given or, if it is `of_piece`, between pieces; arguments as of `begin_with`."""
        source = n
        of_piece = 0
        if cut_pieces > 0:
            source = pieces[n, 2]
            if kept is not None:
                if pieces[n, 3] < LAST:
                    source = cut_behind(n, source)
                    of_piece = 1
                elif kept[2] >= 0 and pieces[n, 3] == LAST:
                    source = kept_first(kept[2], kept[1], source, kept[0][source, 0])
                    of_piece = 1
            else:
                if pieces[n, 3] % LAST != FIRST:
                    source = cut_behind(n, source) - 1
                    of_piece = 1  # noqa: F841

    @T.macro
    def begin_from(state, given, between, states, source, of_piece, head, first):
        """`state` becomes what it begins with, by `find_source`; arguments as of `begin_with`."""
        columns, rows = state.shape
        if of_piece != 0:
            for i, j in T.Parallel(columns, rows):
                state[i, j] = between[source, head, j, first + i]
        else:
            if states > 0:
                for i, j in T.Parallel(columns, rows):
                    state[i, j] = given[source, head, j, first + i]
            else:
                T.clear(state)

    @T.macro
    def begin_with(state, given, between, pieces, states, cut_pieces, n, head, first, kept):
        """`state` [columns, K], in registers, becomes columns `first` on, transposed, of what segment `n` and `head` begin with.

        That is of `given` [`states`, Hv, K, V], nothing where `states` is 0; where there are `pieces` [`cut_pieces`, 4], of `between` [cuts, ...], unless
        the piece is its sequence's first. `kept` is None, or of gradients, which enter sequences at their ends, and says where those of sequences that are
        cut lie, lest others be written over what is given before it is read: (spans [sequences, 2], how many these are, row of `between` from which on, or
        -1: nowhere).
        """
        source = T.alloc_var("int32")
        of_piece = T.alloc_var("int32")
        find_source(source, of_piece, pieces, cut_pieces, n, kept)
        begin_from(state, given, between, states, source, of_piece, head, first)

    return SimpleNamespace(find_source=find_source, begin_from=begin_from, begin_with=begin_with)
