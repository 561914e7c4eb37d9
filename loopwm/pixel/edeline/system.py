"""EDELINE on the looped core: a recurrent memory and a diffusion model of the next frame.

    x_t                 = encoder(o_t) and the action a_t, as one vector
    h_t                 = f(h_{t-1}, x_t)                           the recurrent embedding (memory.py)
    o_{t+1}             ~ p(. | h_t, o_{t-L+1} .. o_t)              a U-Net that denoises in a few steps
    r_t, d_t            ~ p(. | h_t)

Departures from the paper: the looped core instead of Mamba; equation 5 is unbounded below, so
harmonisers are log(1 + exp(s)); memory and noise level are separate keys of the cross-attention, which over one key
would ignore its query; agents may act on h after each action instead of frames. `EdelineLoss` and `EdelineSampling`
contain the options of the published code.

Shape suffixes: B rows, T environment steps, L conditioning frames, C channels, H/W frame, D memory, E condition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwm.pixel.dynamics import Depth, FrameCache
from loopwm.pixel.edeline.auxiliary_losses import LEVELS, Contrast, Preview, novelty, to_signed, unique_frames
from loopwm.pixel.edeline.config import EdelineConfig, EdelineLoss, EdelineSampling
from loopwm.pixel.edeline.memory import Memory
from loopwm.pixel.edeline.unet import FourierFeatures, UNet, UNetConfig
from loopwm.pixel.imagined import Imagined, LatentWorld
from loopwm.pixel.system import Diagnostics, FrameBatch, PixelSystem, mean_of
from loopwm.records.frames import FrameSpace

SIGMA_DATA = 0.5


class Preconditioners(NamedTuple):
    """Preconditioners of each row (EDELINE, equations 13 to 16)."""

    c_in: Tensor
    c_out: Tensor
    c_noise: Tensor
    c_skip: Tensor


def preconditioners(sigma: Tensor) -> Preconditioners:
    """Compute the preconditioners of sigma (B,)."""
    both = sigma.square() + SIGMA_DATA**2
    return Preconditioners(both.rsqrt(), sigma * SIGMA_DATA * both.rsqrt(), sigma.log() / 4, SIGMA_DATA**2 / both)


def harmonised(loss: Tensor, s: Tensor) -> Tensor:
    """Return exp(-s) L + log(1 + exp(s)): least at 2 exp(s) = L + sqrt(L^2 + 4L), at least 0 (EDELINE, equation 5)."""
    return torch.exp(-s) * loss + F.softplus(s)


@dataclass(frozen=True)
class EdelineState:
    """State of a world.

    memory: memory of all frames before the current one
    frames: (B, L, C, H, W) in -1 .. 1, the last one current
    first: bool (B,), True where the current frame begins an episode
    """

    memory: FrameCache
    frames: Tensor
    first: Tensor


class Encoder(nn.Module):
    """Frame encoder (B, C, H, W) -> (B, width); each level has a convolution, a residual one and halves the frame."""

    def __init__(self, channels: tuple[int, ...], stem: int, frame_shape: tuple[int, int, int]) -> None:
        super().__init__()
        height, width, colours = frame_shape
        unit = stem * 2 ** len(channels)
        if height % unit or width % unit:
            raise ValueError(
                f"encoder_channels: {len(channels)} levels and a stem of {stem} halve frames that are divisible by "
                f"{unit}, not {height} x {width}"
            )
        self.stem = stem
        widths = (colours * stem**2, *channels)
        self.inwards = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in zip(widths, channels, strict=False))
        self.onwards = nn.ModuleList(nn.Conv2d(b, b, 3, padding=1) for b in channels)
        self.norms = nn.ModuleList(nn.GroupNorm(max(1, b // 32), b) for b in channels)
        self.width = channels[-1] * (height // unit) * (width // unit)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pixel_unshuffle(x, self.stem)
        for inwards, norm, onwards in zip(self.inwards, self.norms, self.onwards, strict=True):
            x = inwards(x)
            x = F.avg_pool2d(x + onwards(F.silu(norm(x))), 2)
        return F.silu(x).flatten(1)


class Edeline(PixelSystem):
    name = "edeline"
    Model, Objective, Sampling = EdelineConfig, EdelineLoss, EdelineSampling
    rewards: Tensor

    def __init__(self, config: EdelineConfig, objective: EdelineLoss, space: FrameSpace) -> None:
        super().__init__(config, objective, space)
        self.looped = config.memory
        config.unet.check(space.frame_shape)
        self.shortest = config.burn_in + int(objective.own_frame)
        self.width = space.actions * config.memory.dim  # h after each action
        colours, dim, condition = space.frame_shape[2], config.memory.dim, config.unet.condition
        self.encoder = Encoder(config.encoder_channels, config.encoder_stem, space.frame_shape)
        self.action = nn.Embedding(space.actions, config.action_dim)
        self.inwards = nn.Linear(self.encoder.width + config.action_dim, dim)
        self.memory = Memory(config.memory)
        self.reward_head = _head(dim, config.head_hidden, len(config.rewards))
        self.end_head = _head(dim, config.head_hidden, 1)
        self.unet = UNet(config.unet, colours * (config.frames + 1), colours)
        self.noise = nn.Sequential(FourierFeatures(condition), nn.Linear(condition, condition), nn.SiLU())
        self.memory_key, self.noise_key = nn.Linear(dim, condition), nn.Linear(condition, condition)
        self.memory_map = _map(config.unet, dim, space.frame_shape)
        if objective.preview and not config.unet.memory_map:
            raise ValueError("unet.memory_map: must be at least 1 with objective.preview, got 0")
        self.preview = Preview(config.unet.memory_map, colours, config.unet.stem) if objective.preview else None
        self.contrast = Contrast(dim, self.encoder.width) if objective.contrast else None
        self.condition = nn.Sequential(nn.Linear(2 * condition, condition), nn.SiLU(), nn.Linear(condition, condition))
        self.harmonisers = nn.Parameter(torch.zeros(2))
        """Harmonisers of frame loss and reward loss."""
        self.register_buffer("rewards", torch.tensor(config.rewards), persistent=False)  # `config` has them

    # -- memory --------------------------------------------------------------------------------------------------

    def embed(self, frames: Tensor, action: Tensor) -> Tensor:
        """Embed frames (N, C, H, W) and actions (N,) as x (N, D)."""
        return self.inwards(torch.cat((self.encoder(frames), self.action(action)), -1))

    def remember(self, obs: Tensor, action: Tensor, first: Tensor, depth: Depth) -> tuple[Tensor, Tensor]:
        """Run the memory from an empty state over frames uint8 (B, T, H, W, C).

        Returns:
            h (B, T, D) and loops (B, T).
        """
        x = self.embed(to_signed(obs).flatten(0, 1), action.flatten()).unflatten(0, action.shape)
        out = self.memory(x, first, depth)
        return out.h, out.loops

    # -- frames --------------------------------------------------------------------------------------------------

    def network(self, noised: Tensor, c_noise: Tensor, before: Tensor, h: Tensor) -> Tensor:
        """Run the U-Net: F (B, C, H, W) of scaled noised frames, given frames (B, L, C, H, W) and memory h (B, D)."""
        noise, memory = self.noise(c_noise), self.memory_key(h)
        keys = torch.stack((memory, self.noise_key(noise)), 1)
        condition = self.condition(torch.cat((memory, noise), -1))
        memory_map = None if self.memory_map is None else self.memory_map(h)
        return self.unet(torch.cat((noised, before.flatten(1, 2)), 1), condition, keys, memory_map)

    def denoised(self, noised: Tensor, sigma: Tensor, before: Tensor, h: Tensor) -> Tensor:
        """Denoise: D(x; sigma) = c_skip x + c_out F(c_in x; c_noise) (EDELINE, equation 10); sigma: (B,)."""
        c = preconditioners(sigma)
        out = self.network(_wide(c.c_in) * noised, c.c_noise, before, h)
        return _wide(c.c_skip) * noised + _wide(c.c_out) * out

    def frame_loss(
        self, target: Tensor, before: Tensor, h: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the denoised frames. The loss is the squared error of F at sampled noise levels.

        The target is (o - c_skip x) / c_out.
        """
        o, batch = self.objective, len(target)
        normal = torch.randn(batch, generator=generator, device=generator.device).to(target.device)
        sigma = (normal * o.noise_std + o.noise_mean).exp().clamp(o.sigma_min, o.sigma_max)
        offset = torch.randn(*target.shape[:2], 1, 1, generator=generator, device=generator.device)
        each = torch.randn(target.shape, generator=generator, device=generator.device)
        noised = target + _wide(sigma) * each.to(target.device) + o.offset_noise * offset.to(target.device)
        # The offset is part of the noise: its variance adds to that of sigma.
        c = preconditioners((sigma.square() + o.offset_noise**2).sqrt())
        out = self.network(_wide(c.c_in) * noised, c.c_noise, before, h)
        regression_target = (target - _wide(c.c_skip) * noised) / _wide(c.c_out)
        frame = _wide(c.c_skip) * noised + _wide(c.c_out) * out
        return (out - regression_target).square().mean(), frame.detach()  # only conditions the next

    def sampled(self, before: Tensor, h: Tensor, sampling: EdelineSampling, generator: torch.Generator) -> Tensor:
        """Sample frames (B, C, H, W) by Euler steps from normal noise."""
        shape = before[:, 0].shape
        noise = torch.randn(shape, generator=generator, device=generator.device)
        x = (sampling.sigma_max if sampling.noise == "sigma_max" else 1.0) * noise.to(before.device)
        sigmas = sampling.sigmas()
        for sigma, following in pairwise(sigmas):
            # Training folds the offset noise into sigma, so the network expects it in its noise level.
            level = torch.full((len(x),), math.hypot(sigma, self.objective.offset_noise), device=x.device)
            frame = (self.denoised(x, level, before, h).clamp(-1, 1) + 1) / 2 * LEVELS
            denoised = frame.round() / LEVELS * 2 - 1  # one of the levels of a byte
            x = x + (x - denoised) / sigma * (following - sigma)  # Euler: dx / dsigma = (x - D) / sigma
        return x

    # -- training ------------------------------------------------------------------------------------------------

    def loss(self, batch: FrameBatch, depth: Depth, generator: torch.Generator) -> tuple[Tensor, Diagnostics]:
        """Compute equation 5 for random target frames (with `own_frame`, the next ones too).

        Rewards and ends are learned at all steps.
        """
        o = self.objective
        h, loops = self.remember(batch.obs, batch.action, batch.first, depth)
        chances = self._chances(batch)
        at = self._sample_steps(chances, generator)
        frames, own = [], None
        for later in range(1 + int(o.own_frame)):
            loss, own = self._target_loss(batch, h, at + later, own, generator)
            frames.append(loss)
        frame = torch.stack(frames).mean()
        kinds = (batch.reward[..., None] - self.rewards).abs().argmin(-1)
        reward = F.cross_entropy(self.reward_head(h).flatten(0, 1), kinds.flatten())
        end = F.binary_cross_entropy_with_logits(self.end_head(h)[..., 0], batch.terminated.float())
        auxiliary = self._auxiliary_losses(batch, chances, h)
        parts = harmonised(torch.stack((frame, reward)), self.harmonisers)
        count = batch.action.numel()
        diagnostics = {
            "loss": mean_of(frame, count),
            "reward_loss": mean_of(reward, count),
            "done_loss": mean_of(end, count),
            "mean_depth": mean_of(loops.float().mean(), count),
        }
        weighted = h.new_zeros(())
        for weight, name in ((o.preview, "preview"), (o.contrast, "contrast")):
            if name in auxiliary:
                diagnostics[f"{name}_loss"] = mean_of(auxiliary[name], count)
                weighted = weighted + weight * auxiliary[name]
        return parts[0] + parts[1] + end + weighted, diagnostics

    def _chances(self, batch: FrameBatch) -> Tensor:
        """Return the target probabilities of the steps after the burn-in: (B, steps)."""
        # `own_frame` trains a second step, which must lie in the segment, too.
        share, end = self.objective.novelty, batch.action.shape[1] - int(self.objective.own_frame)
        even = torch.ones(len(batch.action), end - self.config.burn_in + 1, device=batch.action.device)
        new = novelty(batch, self.config.frames)[:, self.config.burn_in - 1 : end] if share else even
        new = torch.where(new.sum(1, keepdim=True) > 0, new, 1)  # rows where nothing changes: evenly
        return share * new / new.sum(1, keepdim=True) + (1 - share) / even.shape[1]

    def _sample_steps(self, chances: Tensor, generator: torch.Generator) -> Tensor:
        """Sample each row's step, (B,), whose next frame is predicted."""
        u = torch.rand(len(chances), 1, generator=generator, device=generator.device).to(chances.device)
        # Double: float32 sums of small chances round the last steps away.
        cumulated = chances.double().cumsum(1)
        index = torch.searchsorted(cumulated, u * cumulated[:, -1:], right=True)
        return self.config.burn_in - 1 + index.clamp(max=chances.shape[1] - 1).flatten()

    def _auxiliary_losses(self, batch: FrameBatch, chances: Tensor, h: Tensor) -> dict[str, Tensor]:
        """Return the auxiliary losses of the steps after the burn-in, by the name of their weight."""
        steps = slice(self.config.burn_in - 1, self.config.burn_in - 1 + chances.shape[1])
        memories, frames = h[:, steps].flatten(0, 1), batch.next_obs[:, steps].flatten(0, 1)
        errors = {}
        if self.preview is not None and self.memory_map is not None:
            errors["preview"] = self.preview.error(self.memory_map(memories), to_signed(frames))
        if self.contrast is not None:
            candidates, target = unique_frames(frames)  # equal frames must not be rivals
            errors["contrast"] = self.contrast.error(memories, self.encoder(to_signed(candidates)), target)
        return {name: (chances * each.view(chances.shape)).sum(1).mean() for name, each in errors.items()}

    def _target_loss(
        self, batch: FrameBatch, h: Tensor, at: Tensor, own: Tensor | None, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the frame loss of steps `at` (B,) and the denoised frames.

        `own`, the model's frames of the step before, replace the last conditioning frame within an episode.
        """
        length = self.config.frames
        rows = torch.arange(len(h), device=at.device)
        places = at[:, None] + torch.arange(1 - length, 1, device=at.device)
        before = to_signed(batch.obs[rows[:, None], places])
        begins = batch.first[rows[:, None], places]
        if own is not None:
            before[:, -1] = torch.where(_wide(begins[:, -1]), before[:, -1], own)
        # Frames of other episodes would leak across a reset; zeros are what `start` pads with.
        before = before * _wide(same_episode(begins))
        return self.frame_loss(to_signed(batch.next_obs[rows, at]), before, h[rows, at], generator)

    def world(self, sampling: EdelineSampling | None = None) -> EdelineWorld:
        return EdelineWorld(self, self.sampling if sampling is None else sampling)


class EdelineWorld(LatentWorld[EdelineState]):
    """World with one memory pass per step and one U-Net pass per denoising step."""

    def __init__(self, system: Edeline, sampling: EdelineSampling) -> None:
        self.system, self.sampling, self.space = system, sampling, system.space
        self.depth, self.width = system.looped.default_depth, system.width
        self.context = system.config.memory.window

    @torch.no_grad()
    def start(self, obs: Tensor, action: Tensor, first: Tensor, generator: torch.Generator) -> EdelineState:
        frames, length = to_signed(obs), self.system.config.frames
        memory = self.system.memory.initial(len(obs), obs.device)
        if action.shape[1]:
            x = self.system.embed(frames[:, :-1].flatten(0, 1), action.flatten()).unflatten(0, action.shape)
            memory = self.system.memory(x, first[:, :-1], self.depth, memory).state
        missing = max(0, length - frames.shape[1])  # zeros stand for frames before the start
        begins = F.pad(first[:, -length:], (missing, 0))
        last = F.pad(frames[:, -length:], (0, 0, 0, 0, 0, 0, missing, 0)) * _wide(same_episode(begins))
        return EdelineState(memory, last, first[:, -1])

    @torch.no_grad()
    def observe(
        self, state: EdelineState, action: Tensor, obs: Tensor, first: Tensor, generator: torch.Generator
    ) -> EdelineState:
        _, memory = self._remember(state, action)
        before = state.frames[:, 1:] * _wide(~first[:, None])  # not those of the last episode
        return EdelineState(memory, torch.cat((before, to_signed(obs)[:, None]), 1), first)

    @torch.no_grad()
    def step(self, state: EdelineState, action: Tensor, generator: torch.Generator) -> Imagined[EdelineState]:
        h, memory = self._remember(state, action)
        chances = self.system.reward_head(h).float().softmax(-1).to(generator.device)
        # Sample on the generator's device, so that a run draws the same numbers on every device.
        kinds = torch.multinomial(chances, 1, generator=generator)
        ends = self.system.end_head(h)[:, 0].float().sigmoid()
        terminated = torch.rand(ends.shape, generator=generator, device=generator.device).to(h.device) < ends
        frame = self.system.sampled(state.frames, h, self.sampling, generator)
        after = EdelineState(memory, torch.cat((state.frames[:, 1:], frame[:, None]), 1), torch.zeros_like(terminated))
        return Imagined(self.system.rewards[kinds[:, 0].to(h.device)], terminated, after)

    @torch.no_grad()
    def features(self, state: EdelineState) -> Tensor:
        """Return h after each action, (B, A D), from which the reward head predicts."""
        batch, actions = len(state.first), self.space.actions
        rows = torch.arange(batch, device=state.first.device).repeat_interleave(actions)  # every action in every row
        each = EdelineState(state.memory.select(rows), state.frames[rows, -1:], state.first[rows])
        h, _ = self._remember(each, torch.arange(actions, device=rows.device).repeat(batch))
        return h.float().unflatten(0, (batch, actions)).flatten(1)

    def _remember(self, state: EdelineState, action: Tensor) -> tuple[Tensor, FrameCache]:
        x = self.system.embed(state.frames[:, -1], action)
        out = self.system.memory.step(x, state.first, self.depth, state.memory)
        return out.h, out.state

    def show(self, state: EdelineState) -> Tensor:
        frame = (state.frames[:, -1].clamp(-1, 1) + 1) / 2 * LEVELS
        return frame.round().byte().permute(0, 2, 3, 1)


def same_episode(begins: Tensor) -> Tensor:
    """Mark the frames (B, L) of the last frame's episode. begins: bool (B, L), True at an episode's first frame."""
    later = begins.flip(1).long().cumsum(1).flip(1) - begins.long()  # beginnings after each frame
    return later == 0


def _wide(x: Tensor) -> Tensor:
    """Append three dimensions of size 1, for C, H and W."""
    return x[..., None, None, None]


def _head(dim: int, hidden: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, out))


def _map(config: UNetConfig, dim: int, frame_shape: tuple[int, int, int]) -> nn.Module | None:
    """Create the projection of a memory (B, D) to channels over the U-Net's first map."""
    if not config.memory_map:
        return None
    sides = [side // config.stem for side in frame_shape[:2]]
    places = math.prod(sides)
    return nn.Sequential(nn.Linear(dim, config.memory_map * places), nn.Unflatten(1, (config.memory_map, *sides)))
