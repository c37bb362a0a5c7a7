"""Grid: the numbers that a group of weights can become, and the scale by which they are nearest to what they were.

Legend: N outputs · G groups of inputs · S inputs of a group
"""

from dataclasses import dataclass

import torch

from ridgeline.quant.stored import StoredFormat, StoredMatrix

SHRINKS = tuple(1 - 0.05 * step for step in range(11))  # of the range of a group, tried by a search


@dataclass(frozen=True, slots=True)
class Grid:
    """Uniform codes of `form`; scales are numbers of `scale_dtype`, in which they are stored, and of float16."""

    form: StoredFormat
    scale_dtype: torch.dtype

    @property
    def lowest(self) -> int:
        """The lowest code that is used: 8-bit kernels take -127 to 127."""
        return 1 if self.form.bits == 8 and self.form.zero == "fixed" else 0

    @property
    def highest(self) -> int:
        return (1 << self.form.bits) - 1

    def fit(self, w_NGS: torch.Tensor, importance_GS: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and zero [N, G] of every group: its range or, with importances, what of it loses least."""
        w_NGS = w_NGS.float()
        low, high = w_NGS.amin(-1), w_NGS.amax(-1)
        if importance_GS is None:
            return self._of_range(low, high)
        best = torch.full_like(low, torch.inf)
        scale, zero = torch.zeros_like(low), torch.zeros_like(low)
        for shrink in SHRINKS:
            for ends in ((shrink * low, shrink * high), (-shrink * high, -shrink * low)):
                tried_scale, tried_zero = self._of_range(*ends)
                error_NGS = self.values(self.codes(w_NGS, tried_scale, tried_zero), tried_scale, tried_zero) - w_NGS
                loss = (error_NGS.square() * importance_GS).sum(-1)
                is_better = loss < best
                best = torch.where(is_better, loss, best)
                scale, zero = torch.where(is_better, tried_scale, scale), torch.where(is_better, tried_zero, zero)
                if self.form.zero == "points":
                    break  # the other sign is no other grid
        return scale, zero

    def codes(self, w_NGS: torch.Tensor, scale_NG: torch.Tensor, zero_NG: torch.Tensor) -> torch.Tensor:
        """Round to nearest, as float32."""
        divisor = torch.where(scale_NG == 0, torch.inf, scale_NG)[..., None]
        return ((w_NGS / divisor).round() + zero_NG[..., None]).clamp(self.lowest, self.highest)

    def values(self, codes_NGS: torch.Tensor, scale_NG: torch.Tensor, zero_NG: torch.Tensor) -> torch.Tensor:
        """Return what codes stand for."""
        return (codes_NGS - zero_NG[..., None]) * scale_NG[..., None]

    def stored(self, codes_NK: torch.Tensor, scale_NG: torch.Tensor, zero_NG: torch.Tensor) -> StoredMatrix:
        """Return the matrix with these codes."""
        points = zero_NG.to(torch.uint8).numpy() if self.form.zero == "points" else None
        return StoredMatrix(self.form, codes_NK.to(torch.uint8).numpy(), scale_NG.float().numpy(), points)

    def grouped(self, x_K: torch.Tensor) -> torch.Tensor:
        """Return inputs [.., K] in groups [.., G, S]."""
        return x_K.unflatten(-1, (-1, self.form.group or x_K.shape[-1]))

    def _of_range(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and zero of a range. Without zero points its larger end becomes the lowest code."""
        if self.form.zero == "points":
            low, high = low.clamp(max=0), high.clamp(min=0)
            scale = self._rounded((high - low) / self.highest)
            zero = (-low / torch.where(scale == 0, torch.inf, scale)).round().clamp(0, self.highest)
            return scale, zero
        steps = self.form.fixed_zero - self.lowest
        ends = torch.where(high > -low, high, low) if self.form.bits == 4 else -torch.maximum(high, -low)
        return self._rounded(ends / -steps), torch.full_like(low, self.form.fixed_zero)

    def _rounded(self, scale: torch.Tensor) -> torch.Tensor:
        if self.form.scale == "float16":
            scale = scale.to(torch.float16)
        return scale.to(self.scale_dtype).float()
