"""At which sizes each primitive is measured; laws fill what lies between."""

from __future__ import annotations

#: Rows, columns, inner width: each of the three alone through its range, and products as layers have them.
PRODUCTS = (
    (512, 512, 512),
    (64, 512, 512),
    (256, 256, 256),
    (2048, 256, 256),
    (512, 64, 512),
    (512, 2048, 512),
    (512, 512, 64),
    (512, 512, 2048),
    (1024, 768, 256),
    (1024, 256, 768),
    (256, 128, 256),
    (256, 4096, 256),
    (1024, 2048, 256),
)
#: Sequences, heads, tokens, width of a head.
ATTENTION = ((4, 8, 256, 32), (1, 8, 256, 32), (2, 8, 128, 64), (1, 4, 512, 64), (1, 4, 1024, 64))
#: Tokens and width.
PASSES = ((16, 64), (256, 128), (512, 256), (1024, 256), (1024, 768), (2048, 1024))
LOSSES = ((64, 1024), (256, 2048), (512, 4096), (1024, 4096))
EMBEDDINGS = ((256, 128, 1024), (1024, 256, 4096), (256, 256, 8192))
PARAMS = (1 << 12, 1 << 17, 1 << 20, 1 << 22)
#: Bytes between a device and its host, and parameters that are stepped there.
TRANSFERS, HOST_PARAMS = (1 << 20, 1 << 23), (1 << 20,)
#: Bytes of a collective: the whole buffer, of which shards are parts.
MESSAGES = (1 << 8, 1 << 14, 1 << 17, 1 << 20, 1 << 23)
#: Products between two meetings of ranks.
MEETINGS = (1, 8, 64)
#: What decides how long a GPU takes is larger: these fill it.
LARGE_PRODUCTS = tuple((m, n, k) for m in (1024, 4096, 8192) for n, k in ((4096, 4096), (8192, 1024), (1024, 8192)))
LARGE_ATTENTION = ((1, 16, 2048, 128), (1, 16, 4096, 128), (1, 16, 8192, 128), (2, 16, 2048, 64))
LARGE_PASSES = ((4096, 4096), (8192, 8192))
LARGE_PARAMS = (1 << 22, 1 << 27)
LARGE_TRANSFERS, LARGE_HOST_PARAMS = (1 << 20, 1 << 26, 1 << 28), (1 << 25,)
LARGE_MESSAGES = (1 << 12, 1 << 18, 1 << 22, 1 << 25, 1 << 28)
