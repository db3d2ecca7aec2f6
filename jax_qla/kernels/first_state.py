"""What a block of a kernel that goes through a sequence, or a piece of one, begins with: a state, or the gradient of one.

That of a sequence, and of the piece that it is entered by where it is cut (jax_qla/segments.py), is what the caller gives, or zero. That of any other piece
kernels/compose.py has found: it lies at the cut by which the piece is entered.
"""

from jax_qla.kernels.common import FIRST, LAST, cut_behind


def macro():
    """The macro `begin_with`, built on demand so that importing this needs no TileLang."""
    import tilelang.language as T

    @T.macro
    def begin_with(state, given, between, pieces, states, cut_pieces, n, head, first, wanted, reverse):
        """`state` [columns, K], in registers, becomes columns `first` on, transposed, of what segment `n` and `head` begin with.

        That is of `given` [`states`, Hv, K, V], nothing where `states` is 0; where there are `pieces` [`cut_pieces`, 4], of `between` [cuts, ...], unless
        the piece is its sequence's first or, in `reverse`, its last. Where it is not `wanted`, zero.
        """
        columns, rows = state.shape
        source = T.alloc_var("int32")
        source = n
        of_piece = T.alloc_var("int32")
        of_piece = 0
        if cut_pieces > 0:
            source = pieces[n, 2]
            if reverse:
                if pieces[n, 3] < LAST:
                    source = cut_behind(n, source)
                    of_piece = 1
            else:
                if pieces[n, 3] % LAST != FIRST:
                    source = cut_behind(n, source) - 1
                    of_piece = 1
        if of_piece != 0:
            for i, j in T.Parallel(columns, rows):
                state[i, j] = between[source, head, j, first + i]
        else:
            if states > 0 and wanted:
                for i, j in T.Parallel(columns, rows):
                    state[i, j] = given[source, head, j, first + i]
            else:
                T.clear(state)

    return begin_with
