"""What all request bodies have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """Unknown fields are ignored, types are not converted, and no number is infinite or NaN."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
