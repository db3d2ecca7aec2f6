"""What a block of a kernel that goes through a sequence, or a piece of one, begins with: a state, or the gradient of one.

That of a sequence is what the caller gives, or zero. Where sequences are cut into pieces (jax_qla/segments.py), that of a piece is what kernels/compose.py
has found; but a sequence that is not cut, and so its only piece, takes no part in that, and begins as without pieces.
"""

from jax_qla.kernels.common import FIRST, LAST


def macro():
    """The macro `begin_with`, built on demand so that importing this needs no TileLang."""
    import tilelang.language as T

    @T.macro
    def begin_with(state, given, between, pieces, states, cut_pieces, n, head, first, wanted):
        """`state` [columns, K], in registers, becomes columns `first` on, transposed, of what segment `n` and `head` begin with.

        That is of `given` [`states`, Hv, K, V], nothing where `states` is 0; where there are `pieces` [`cut_pieces`, 4], of `between` [`cut_pieces`, ...],
        unless the piece is a whole sequence. Where it is not `wanted`, zero.
        """
        columns, rows = state.shape
        source = T.alloc_var("int32")
        source = n
        of_piece = T.alloc_var("int32")
        of_piece = 0
        if cut_pieces > 0:
            if pieces[n, 3] == FIRST + LAST:
                source = pieces[n, 2]
            else:
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
