"""What a block of a kernel that goes through a sequence, or a piece of one, begins with: a state, or the gradient of one.

That of a sequence, and of the piece that it is entered by where it is cut (jax_qla/segments.py), is what the caller gives, or zero. That of any other piece
kernels/compose.py has found: it lies at the cut by which the piece is entered.
"""

from jax_qla.kernels.common import FIRST, LAST, cut_behind
from jax_qla.kernels.macros import kept_first


def macro():
    """The macro `begin_with`, built on demand so that importing this needs no TileLang."""
    import tilelang.language as T

    @T.macro
    def begin_with(state, given, between, pieces, states, cut_pieces, n, head, first, kept):
        """`state` [columns, K], in registers, becomes columns `first` on, transposed, of what segment `n` and `head` begin with.

        That is of `given` [`states`, Hv, K, V], nothing where `states` is 0; where there are `pieces` [`cut_pieces`, 4], of `between` [cuts, ...], unless
        the piece is its sequence's first. `kept` is None, or of gradients, which enter sequences at their ends, and says where those of sequences that are
        cut lie, lest others be written over what is given before it is read: (spans [sequences, 2], how many these are, row of `between` from which on, or
        -1: nowhere).
        """
        columns, rows = state.shape
        source = T.alloc_var("int32")
        source = n
        of_piece = T.alloc_var("int32")
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
                    of_piece = 1
        if of_piece != 0:
            for i, j in T.Parallel(columns, rows):
                state[i, j] = between[source, head, j, first + i]
        else:
            if states > 0:
                for i, j in T.Parallel(columns, rows):
                    state[i, j] = given[source, head, j, first + i]
            else:
                T.clear(state)

    return begin_with
