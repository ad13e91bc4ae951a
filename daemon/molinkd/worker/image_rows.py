"""Rows of images in a step of the first stage."""

from collections.abc import Sequence

import torch

from molink.stage.batch import ImageRows
from molink.wire.messages.data_plane import RequestSlice
from molinkd.worker.request_table import RequestTable


def collect_image_rows(slices: Sequence[RequestSlice], requests: RequestTable) -> ImageRows | None:
    """Rows of images among the rows of ``slices``; ``None`` if there are none.

    Images whose last row is among them are dropped: no row runs twice in an admission.
    """
    indices: list[int] = []
    parts: list[torch.Tensor] = []
    first = 0
    for rows in slices:
        end = rows.start + rows.count
        for image in requests[rows.request].images:
            span = image.span
            if image.rows is None or span.end <= rows.start or end <= span.start:
                continue
            positions = range(max(span.start, rows.start), min(span.end, end))
            placed = [(at, row) for at in positions if (row := span.row_at(at)) is not None]
            indices += (first + at - rows.start for at, _ in placed)
            parts.append(image.rows[[row for _, row in placed]])
            if span.end <= end:
                image.rows = None
        first += rows.count
    return ImageRows(indices, torch.cat(parts)) if indices else None
