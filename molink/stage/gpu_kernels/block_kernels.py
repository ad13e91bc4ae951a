"""Products with low-bit weights, in Triton; :mod:`.block_planes` describes their planes.

A *slice* is ``WIDTH`` consecutive columns of one group, so its scale is one number per output. A
``GROUP`` of 0 is a whole row. Weights are the left operand of tensor cores, so they can be decoded
in the registers that tensor cores read.
"""

import triton
import triton.language as tl


@triton.jit
def _join_halves(pairs, KIND: tl.constexpr):
    """Return numbers ``[outputs, 2 · pairs]`` made of the lower and upper halves of ``pairs``."""
    lower = pairs.to(tl.int16).to(KIND, bitcast=True)
    upper = (pairs >> 16).to(tl.int16).to(KIND, bitcast=True)
    return tl.reshape(tl.join(lower, upper), (pairs.shape[0], 2 * pairs.shape[1]))


@triton.constexpr_function
def _find_bias(form, kind):
    """Return the excess over codes of ``kind`` floats whose mantissas end with the codes' bits."""
    if kind == tl.float16:
        return form[1] + 1024
    return form[1] + (128 if kind == tl.bfloat16 and form[0] == 4 else 1 << 23)


@triton.jit
def _decode_slice(
    words,
    high,
    codebook,
    index: tl.constexpr,
    FORM: tl.constexpr,
    KIND: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Decode values ``[outputs, WIDTH]`` of slice ``index`` for rows of ``KIND``, without scales.

    They are exact, in a type that holds them, except for codebook values, which are rounded to 16
    bits for 16-bit rows. Floats of 4 and 8 bits are ``1 / UNIT`` times their value. ``BIASED``
    integers are too large by ``_find_bias``.
    """
    BITS: tl.constexpr = FORM[0]
    OFFSET: tl.constexpr = FORM[1]
    HIGH: tl.constexpr = FORM[4]
    CODES: tl.constexpr = FORM[9]
    if BITS == 8:
        pairs = (words >> (8 * index)) & 0x00FF00FF
    else:
        pairs = (words >> (4 * index)) & 0x000F000F
    if HIGH > 0:
        mask: tl.constexpr = ((1 << HIGH) - 1) * 0x00100010
        if HIGH * index < 4:
            pairs |= (high << (4 - HIGH * index)) & mask
        else:
            pairs |= (high >> (HIGH * index - 4)) & mask
    if CODES == "e2m1":
        bits = ((pairs & 0x00080008) << 12) | ((pairs & 0x00070007) << 9)
        values = _join_halves(bits, tl.float16)
    elif CODES == "e4m3":
        bits = ((pairs & 0x00800080) << 8) | ((pairs & 0x007F007F) << 7)
        values = _join_halves(bits, tl.float16)
    elif CODES == "codebook":
        lower, upper = pairs & 15, pairs >> 16
        values = tl.join(tl.load(codebook + lower), tl.load(codebook + upper)).to(tl.float32)
        if tl.float32 == KIND:
            codebook += 16
            values += tl.join(tl.load(codebook + lower), tl.load(codebook + upper)).to(tl.float32)
        values = tl.reshape(values, (pairs.shape[0], 2 * pairs.shape[1]))
    else:
        BIAS: tl.constexpr = _find_bias(FORM, KIND)
        if BIAS == OFFSET + (1 << 23):
            lower = ((pairs & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True)
            upper = ((pairs >> 16) | 0x4B000000).to(tl.float32, bitcast=True)
            values = tl.reshape(tl.join(lower, upper), (pairs.shape[0], 2 * pairs.shape[1]))
            values -= BIAS
        else:
            magic: tl.constexpr = 0x64006400 if tl.float16 == KIND else 0x43004300
            values = _join_halves(pairs | magic, KIND)
            if not BIASED:
                # Converting back to KIND lets one instruction process two values.
                values = (values.to(tl.float32) - BIAS).to(KIND)
    return values


@triton.jit
def _find_number(chunk, index: tl.constexpr, SIZE: tl.constexpr, FORM: tl.constexpr):
    """Return which group (or block) of ``SIZE`` columns has slice ``index`` of a chunk."""
    WIDTH: tl.constexpr = FORM[8]
    COLUMNS: tl.constexpr = 16 // FORM[0] * WIDTH
    if SIZE == 0:
        number = 0
    elif SIZE % COLUMNS == 0:
        number = chunk // (SIZE // COLUMNS)
    elif COLUMNS % SIZE == 0:
        number = chunk * (COLUMNS // SIZE) + index * WIDTH // SIZE
    else:
        number = (chunk * COLUMNS + index * WIDTH) // SIZE
    return number


@triton.jit
def _decode_steps(steps, index: tl.constexpr, STEP_KIND: tl.constexpr, HAS_MINIMUM: tl.constexpr):
    """Return byte ``index`` of ``steps`` as float32."""
    if STEP_KIND == "e4m3":
        # Read as float16 bits, they are 256 times too small.
        code = steps >> (8 * index)
        bits = ((code & 128) << 8) | ((code & 127) << 7)
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256
    if STEP_KIND == "e8m0":
        return (((steps >> (8 * index)) & 255) << 23).to(tl.float32, bitcast=True)
    if HAS_MINIMUM:
        return ((steps >> (8 * index)) & 255).to(tl.float32)
    return ((steps << (24 - 8 * index)) >> 24).to(tl.float32)


@triton.jit
def _load_scales(
    planes, steps, chunk, index: tl.constexpr, outputs, inside, size, FORM: tl.constexpr
):
    """Load scales and minima float32 ``[outputs]`` of slice ``index``; shifts become minima.

    Without minima and shifts, scales are returned as minima. ``steps`` are the chunk's nested
    scales, one per group. ``UNIT`` is the factor by which ``_decode_slice`` returns floats too
    small.
    """
    GROUP: tl.constexpr = FORM[2]
    HAS_MINIMUM: tl.constexpr = FORM[5]
    NESTED: tl.constexpr = FORM[6]
    HAS_SHIFTS: tl.constexpr = FORM[7]
    CODES: tl.constexpr = FORM[9]
    SHARED_ROWS: tl.constexpr = FORM[10]
    STEP_KIND: tl.constexpr = FORM[11]
    UNIT: tl.constexpr = 16384 if CODES == "e2m1" else (256 if CODES == "e4m3" else 1)
    SIZE: tl.constexpr = FORM[3] if NESTED else GROUP
    place = _find_number(chunk, index, SIZE, FORM) * (size // SHARED_ROWS) + outputs // SHARED_ROWS
    scale = tl.load(planes[2] + place, mask=inside, other=0).to(tl.float32)
    minimum = scale
    step: tl.constexpr = index * FORM[8] // GROUP if NESTED else 0
    if NESTED:
        scale *= _decode_steps(steps[0], step, STEP_KIND, HAS_MINIMUM)
    if HAS_MINIMUM:
        minimum = tl.load(planes[3] + place, mask=inside, other=0).to(tl.float32)
        if NESTED:
            minimum *= _decode_steps(steps[1], step, STEP_KIND, HAS_MINIMUM)
    if HAS_SHIFTS:
        minimum = scale * tl.load(planes[6] + place, mask=inside, other=0).to(tl.float32)
    return scale * UNIT, minimum


@triton.jit
def _load_chunk(planes, chunk, outputs, inside, size, FORM: tl.constexpr):
    """Load a chunk's low and upper bits ``[outputs, WIDTH / 2]``, and the steps of its scales."""
    HIGH: tl.constexpr = FORM[4]
    HAS_MINIMUM: tl.constexpr = FORM[5]
    NESTED: tl.constexpr = FORM[6]
    PAIRS: tl.constexpr = FORM[8] // 2
    first = tl.cast(chunk, tl.int64) * size
    at = outputs[:, None] * PAIRS + tl.arange(0, PAIRS)[None]
    words = tl.load(planes[0] + first * PAIRS + at, mask=inside[:, None], other=0)
    high = words
    if HIGH > 0:
        high = tl.load(planes[1] + first * PAIRS + at, mask=inside[:, None], other=0).to(tl.int32)
        high = (high & ((1 << 8 * HIGH) - 1)) | (high << (16 - 4 * HIGH))
    steps = outputs, outputs
    if NESTED:
        ours = tl.load(planes[4] + first + outputs, mask=inside, other=0).to(tl.int32)
        theirs = ours
        if HAS_MINIMUM:
            theirs = tl.load(planes[5] + first + outputs, mask=inside, other=0).to(tl.int32)
        steps = ours, theirs
    return words, high, steps


@triton.jit
def _sum_products(
    rows,
    planes,
    sources,
    real,
    outputs,
    inside,
    size,
    first,
    last,
    FORM: tl.constexpr,
    CHUNKS: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
):
    """Sum products over steps ``first … last - 1`` of ``CHUNKS`` chunks.

    Returns float32 ``[outputs, rows]``.

    ``rows`` begin at ``sources`` (int64 ``[rows]``); rows that aren't ``real`` count as zeros. With
    ``SCALE_SUMS`` the sums of groups are scaled, otherwise the weights.
    """
    KIND: tl.constexpr = rows.dtype.element_ty
    EXACT: tl.constexpr = rows.dtype.element_ty == tl.float32
    WIDTH: tl.constexpr = FORM[8]
    SLICES: tl.constexpr = 16 // FORM[0]
    HAS_MINIMUM: tl.constexpr = FORM[5] or FORM[7]
    # Minima absorb the bias of codes, once per group.
    BIASED: tl.constexpr = HAS_MINIMUM and FORM[0] == 4 and FORM[9] == "integer" and not EXACT
    # Slices of a chunk that lie in one group.
    TOGETHER: tl.constexpr = FORM[12]
    at = sources[None] + tl.arange(0, WIDTH)[:, None]
    one = tl.full((outputs.shape[0], WIDTH // 2), 1, tl.float32).to(KIND)
    ones = tl.reshape(tl.join(one, one), (outputs.shape[0], WIDTH))
    total = tl.zeros((outputs.shape[0], sources.shape[0]), tl.float32)
    for step in range(first, last):
        for part in tl.static_range(CHUNKS):
            chunk = step * CHUNKS + part
            words, high, numbers = _load_chunk(planes, chunk, outputs, inside, size, FORM)
            sums, given_sums = total, total
            for index in tl.static_range(SLICES):
                column = (chunk * SLICES + index) * WIDTH
                given = tl.load(rows + column + at, mask=real[None], other=0)
                values = _decode_slice(words, high, planes[7], index, FORM, KIND, BIASED)
                scale, minimum = _load_scales(
                    planes, numbers, chunk, index, outputs, inside, size, FORM
                )
                if BIASED:
                    minimum -= scale * _find_bias(FORM, KIND)
                if SCALE_SUMS:
                    if index % TOGETHER == 0:
                        sums = tl.dot(values.to(KIND), given)
                        if HAS_MINIMUM:
                            given_sums = tl.dot(ones, given)
                    else:
                        sums = tl.dot(values.to(KIND), given, sums)
                        if HAS_MINIMUM:
                            given_sums = tl.dot(ones, given, given_sums)
                    if index % TOGETHER == TOGETHER - 1:
                        total += sums * scale[:, None]
                        if HAS_MINIMUM:
                            total += given_sums * minimum[:, None]
                else:
                    weights = values.to(tl.float32) * scale[:, None]
                    if HAS_MINIMUM:
                        weights += minimum[:, None]
                    total = tl.dot(weights.to(KIND), given, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["count", "chunks", "steps_per_split", "has_bias"])
def multiply_kernel(
    rows,
    planes,
    bias,
    results,
    count,
    depth,
    size,
    chunks,
    steps_per_split,
    has_bias,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
):
    """Multiply ``rows [count, depth]``; ``results`` is ``[splits, count, size]``.

    The grid is (tiles of outputs, splits of the columns, tiles of rows).
    """
    split = tl.program_id(1)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = outputs < size
    number = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    real = number < count
    first = split * steps_per_split
    last = tl.minimum(first + steps_per_split, chunks // CHUNKS)
    sources = number.to(tl.int64) * depth
    total = _sum_products(
        rows, planes, sources, real, outputs, inside, size, first, last, FORM, CHUNKS, SCALE_SUMS
    )
    added = tl.load(bias + outputs, mask=inside & (has_bias > 0), other=0).to(tl.float32)
    line = (split * count + number).to(tl.int64)[None] * size + outputs[:, None]
    total += added[:, None]
    stored = real[None] & inside[:, None]
    tl.store(results + line, total.to(results.dtype.element_ty), mask=stored)


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


@triton.jit(do_not_specialize=["first", "count"])
def dequantize_kernel(
    planes,
    tokens,
    results,
    first,
    count,
    depth,
    size,
    FORM: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Write rows ``first … first + count - 1`` of the weight, or those in ``tokens [count]``."""
    KIND: tl.constexpr = results.dtype.element_ty
    WIDTH: tl.constexpr = FORM[8]
    SLICES: tl.constexpr = 16 // FORM[0]
    number = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = number < count
    if HAS_TOKENS:
        outputs = tl.load(tokens + number, mask=inside, other=0)
    else:
        outputs = first + number
    chunk = tl.program_id(1)
    at = number.to(tl.int64)[:, None] * depth + tl.arange(0, WIDTH)[None]
    words, high, steps = _load_chunk(planes, chunk, outputs, inside, size, FORM)
    for index in tl.static_range(SLICES):
        scale, minimum = _load_scales(planes, steps, chunk, index, outputs, inside, size, FORM)
        values = _decode_slice(words, high, planes[7], index, FORM, KIND, False).to(tl.float32)
        values *= scale[:, None]
        if FORM[5] or FORM[7]:
            values += minimum[:, None]
        column = (chunk * SLICES + index) * WIDTH
        tl.store(results + column + at, values.to(KIND), mask=inside[:, None])
