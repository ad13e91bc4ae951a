"""Products with low-bit weights, in Triton; :mod:`.block_planes` describes their planes.

A *slice* is ``WIDTH`` consecutive columns, one of ``32 / BITS`` in a word's bits, and lies in one
group: a slice's scale is one number per output. A ``GROUP`` of 0 is a whole row.
"""

import triton
import triton.language as tl


@triton.jit
def _decode_floats(codes):
    """Float32 of E4M3 floats (int32), exactly: as float16's bits they are 256 times as small."""
    bits = ((codes & 128) << 8) | ((codes & 127) << 7)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256


@triton.jit
def _load_slice(
    planes,
    words,
    high,
    chunk,
    index: tl.constexpr,
    outputs,
    inside,
    size,
    FORM: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Weights float32 ``[WIDTH, outputs]`` of slice ``index`` of a chunk.

    ``words`` and ``high`` are the chunk's low and upper bits; the weight has ``size`` outputs.
    Unless ``EXACT``, values of a codebook are rounded to float16.
    """
    _, _, scales, minima, scale_steps, minimum_steps, shifts, codebook = planes
    BITS: tl.constexpr = FORM[0]
    OFFSET: tl.constexpr = FORM[1]
    GROUP: tl.constexpr = FORM[2]
    BLOCK: tl.constexpr = FORM[3]
    HIGH: tl.constexpr = FORM[4]
    HAS_MINIMUM: tl.constexpr = FORM[5]
    NESTED: tl.constexpr = FORM[6]
    HAS_SHIFTS: tl.constexpr = FORM[7]
    WIDTH: tl.constexpr = FORM[8]
    HAS_CODEBOOK: tl.constexpr = FORM[9]
    IS_FLOAT: tl.constexpr = FORM[10]
    SHARED_ROWS: tl.constexpr = FORM[11]
    STEP_KIND: tl.constexpr = FORM[12]
    if BITS == 8:
        codes = (words << (24 - 8 * index)) >> 24
    else:
        codes = (words >> (4 * index)) & 15
    if HIGH > 0:
        codes |= ((high >> (HIGH * index)) & ((1 << HIGH) - 1)) << 4
    column = (chunk * (32 // BITS) + index) * WIDTH
    row = outputs // SHARED_ROWS
    place = row if GROUP == 0 else (column // GROUP) * (size // SHARED_ROWS) + row
    above = outputs if BLOCK == 0 else (column // BLOCK) * size + outputs
    if HAS_CODEBOOK:
        # Loads of 32 bits would go through shared memory, 64 KiB of it.
        values = tl.load(codebook + codes).to(tl.float32)
        if EXACT:
            values += tl.load(codebook + 16 + codes).to(tl.float32)
    elif IS_FLOAT:
        values = _decode_floats(codes)
    else:
        values = (codes - OFFSET).to(tl.float32)
    if HAS_SHIFTS:
        values += tl.load(shifts + place, mask=inside, other=0).to(tl.float32)[None]
    if NESTED:
        scale = tl.load(scales + above, mask=inside, other=0).to(tl.float32)
        step = tl.load(scale_steps + place, mask=inside, other=0)
        if STEP_KIND == "e4m3":
            scale *= _decode_floats(step.to(tl.int32))
        elif STEP_KIND == "e8m0":
            scale *= (step.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        else:
            scale *= step.to(tl.float32)
    else:
        scale = tl.load(scales + place, mask=inside, other=0).to(tl.float32)
    values *= scale[None]
    if HAS_MINIMUM:
        if NESTED:
            minimum = tl.load(minima + above, mask=inside, other=0).to(tl.float32)
            minimum *= tl.load(minimum_steps + place, mask=inside, other=0).to(tl.float32)
        else:
            minimum = tl.load(minima + place, mask=inside, other=0).to(tl.float32)
        values += minimum[None]
    return values


@triton.jit
def _load_words(planes, chunk, outputs, inside, chunks, FORM: tl.constexpr):
    """Low and upper bits ``[WIDTH, outputs]`` of a chunk."""
    WIDTH: tl.constexpr = FORM[8]
    at = tl.arange(0, WIDTH)[:, None] + (outputs.to(tl.int64) * chunks + chunk)[None] * WIDTH
    words = tl.load(planes[0] + at, mask=inside[None], other=0)
    high = words
    if FORM[4] > 0:
        high = tl.load(planes[1] + at, mask=inside[None], other=0).to(tl.int32)
    return words, high


@triton.jit(do_not_specialize=["count", "chunks", "chunks_per_split", "has_bias"])
def multiply_kernel(
    rows,
    planes,
    bias,
    results,
    count,
    depth,
    size,
    chunks,
    chunks_per_split,
    has_bias,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Products of ``rows [count, depth]``; ``results`` are ``[splits, count, size]``.

    The programs are tiles of outputs, splits of the columns, and tiles of rows. A single row needs
    no tensor cores.
    """
    WIDTH: tl.constexpr = FORM[8]
    EXACT: tl.constexpr = rows.dtype.element_ty == tl.float32
    split = tl.program_id(1)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = outputs < size
    at = tl.arange(0, WIDTH)
    number = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    if ROWS == 1:
        total = tl.zeros((WIDTH, OUTPUTS), tl.float32)
    else:
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    first = split * chunks_per_split
    for chunk in range(first, tl.minimum(first + chunks_per_split, chunks)):
        words, high = _load_words(planes, chunk, outputs, inside, chunks, FORM)
        for index in tl.static_range(32 // FORM[0]):
            weights = _load_slice(
                planes, words, high, chunk, index, outputs, inside, size, FORM, EXACT
            )
            column = (chunk * (32 // FORM[0]) + index) * WIDTH + at
            if ROWS == 1:
                row = rows + tl.program_id(2).to(tl.int64) * depth + column
                given = tl.load(row).to(tl.float32)
                total += given[:, None] * weights
            else:
                row = rows + number.to(tl.int64)[:, None] * depth + column[None]
                given = tl.load(row, mask=(number < count)[:, None], other=0)
                total = tl.dot(given, weights.to(given.dtype), total, input_precision="ieee")
    added = tl.load(bias + outputs, mask=inside & (has_bias > 0), other=0).to(tl.float32)
    kind = results.dtype.element_ty
    if ROWS == 1:
        place = (split * count + tl.program_id(2)).to(tl.int64) * size + outputs
        tl.store(results + place, (tl.sum(total, 0) + added).to(kind), mask=inside)
    else:
        line = (split * count + number).to(tl.int64)[:, None] * size + outputs[None]
        wanted = (number < count)[:, None] & inside[None]
        tl.store(results + line, (total + added[None]).to(kind), mask=wanted)


@triton.jit(do_not_specialize=["total_size", "splits", "has_bias"])
def add_splits_kernel(
    parts, bias, results, total_size, outputs, splits, has_bias, COUNT: tl.constexpr
):
    """Add ``parts [splits, total_size]`` in order, and the bias of ``outputs``."""
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    inside = at < total_size
    total = tl.zeros((COUNT,), tl.float32)
    for split in range(splits):
        total += tl.load(parts + split * total_size + at, mask=inside, other=0)
    total += tl.load(bias + at % outputs, mask=inside & (has_bias > 0), other=0).to(tl.float32)
    tl.store(results + at, total.to(results.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "count", "chunks"])
def dequantize_kernel(
    planes,
    tokens,
    results,
    first,
    count,
    depth,
    size,
    chunks,
    FORM: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Write rows ``first … first + count - 1`` of the weight, or those in ``tokens [count]``."""
    WIDTH: tl.constexpr = FORM[8]
    EXACT: tl.constexpr = results.dtype.element_ty == tl.float32
    number = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = number < count
    if HAS_TOKENS:
        outputs = tl.load(tokens + number, mask=inside, other=0)
    else:
        outputs = first + number
    chunk, at = tl.program_id(1), tl.arange(0, WIDTH)
    words, high = _load_words(planes, chunk, outputs, inside, chunks, FORM)
    for index in tl.static_range(32 // FORM[0]):
        weights = _load_slice(planes, words, high, chunk, index, outputs, inside, size, FORM, EXACT)
        column = (chunk * (32 // FORM[0]) + index) * WIDTH + at
        place = results + number.to(tl.int64)[None] * depth + column[:, None]
        tl.store(place, weights.to(results.dtype.element_ty), mask=inside[None])
