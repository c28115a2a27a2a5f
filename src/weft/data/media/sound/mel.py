"""Log-mel spectrograms: energy by time and pitch, as Whisper's feature extractor and torchaudio define it.

Written with numpy, without its matrix products: these may use threads, whose number would then show in the last bits.
M mel bands, T frames, F frequencies.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

#: Up to this frequency the scale of Slaney's Auditory Toolbox is linear, and logarithmic above.
_KNEE_HZ, _KNEE_MEL, _HZ_PER_MEL = 1000.0, 15.0, 200.0 / 3.0
_LOG_STEP = np.log(6.4) / 27.0
#: The least energy that a logarithm is taken of; how far below the loudest band a value may be, in powers of ten.
_FLOOR, _RANGE = 1e-10, 8.0
#: Frames that are transformed at a time: what lies between is small enough to come from the heap, without new pages.
_AT_ONCE = 32


def log_mel(
    wave: NDArray[np.float32], *, rate: int = 16_000, mels: int = 80, n_fft: int = 400, hop: int = 160
) -> NDArray[np.float32]:
    """Return Whisper's features of a wave, (M, T) with T = len(wave) // hop: about -1 to 1.5, the loudest band highest.

    Args:
        wave: samples, full scale as 1.
        rate: of them, in Hz.
        mels: bands, up to half the rate and at most 8 kHz.
        n_fft: samples of a window.
        hop: samples from one window to the next.
    """
    energy = mel_energy(wave, mel_filters(rate, mels, n_fft, most_hz=8000.0), n_fft, hop)[:, :-1]
    found = np.maximum(energy, _FLOOR)
    np.log10(found, out=found)
    if found.size:
        np.maximum(found, found.max() - _RANGE, out=found)
    found += 4.0
    return (found / 4.0).astype(np.float32)


def mel_energy(wave: NDArray[np.float32], filters_MF: NDArray[np.float64], n_fft: int, hop: int) -> NDArray[np.float64]:
    """Return the energy of each band, (M, T) with T = 1 + len(wave) // hop: windows stand around their middle.

    It is torchaudio's MelSpectrogram with power 2, a periodic Hann window and mirrored ends.

    Args:
        wave: samples.
        filters_MF: of `mel_filters`.
        n_fft: samples of a window.
        hop: samples from one window to the next.
    """
    padded = np.pad(wave, n_fft // 2, mode="reflect" if len(wave) > 1 else "edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, n_fft)[::hop]
    hann = 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(n_fft) / n_fft)
    num_frames = len(windows)
    power_FT = np.empty((n_fft // 2 + 1, num_frames))
    weighed = np.empty((_AT_ONCE, n_fft))
    for start in range(0, num_frames, _AT_ONCE):
        some = windows[start : start + _AT_ONCE]
        spectrum = np.fft.rfft(np.multiply(some, hann, out=weighed[: len(some)]))
        power_FT[:, start : start + _AT_ONCE] = (spectrum.real**2 + spectrum.imag**2).T
    found, part = np.zeros((len(filters_MF), num_frames)), np.empty(num_frames)
    for band, frequency in zip(*np.nonzero(filters_MF), strict=True):
        np.multiply(power_FT[frequency], filters_MF[band, frequency], out=part)
        np.add(found[band], part, out=found[band])
    return found


@lru_cache(maxsize=16)
def mel_filters(
    rate: int,
    mels: int,
    n_fft: int,
    *,
    most_hz: float | None = None,
    scale: str = "slaney",
    is_even: bool = True,
) -> NDArray[np.float64]:
    """Return the weights of triangular bands over the frequencies of a Fourier transform, (M, F).

    Args:
        rate: of the samples, in Hz.
        mels: bands.
        n_fft: samples of a window; F is n_fft // 2 + 1.
        most_hz: where the last band ends; None: at half the rate.
        scale: "slaney" or "htk": how pitch follows from frequency.
        is_even: whether each band is divided by its width, as `norm="slaney"` elsewhere.
    """
    top = min(most_hz or rate / 2, rate / 2)
    edges = _hz(np.linspace(0.0, _mel(top, scale), mels + 2), scale)
    frequencies = np.linspace(0.0, rate // 2, n_fft // 2 + 1)
    rising = (frequencies - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - frequencies) / np.diff(edges)[1:, None]
    found = np.maximum(0.0, np.minimum(rising, falling))
    if is_even:
        found *= (2.0 / (edges[2:] - edges[:-2]))[:, None]
    return found


def _mel(hz: float, scale: str) -> float:
    if scale == "htk":
        return float(2595.0 * np.log10(1.0 + hz / 700.0))
    return float(hz / _HZ_PER_MEL if hz < _KNEE_HZ else _KNEE_MEL + np.log(hz / _KNEE_HZ) / _LOG_STEP)


def _hz(mel: NDArray[np.float64], scale: str) -> NDArray[np.float64]:
    if scale == "htk":
        return 700.0 * (10.0 ** (mel / 2595.0) - 1.0)
    return np.where(mel < _KNEE_MEL, mel * _HZ_PER_MEL, _KNEE_HZ * np.exp(_LOG_STEP * (mel - _KNEE_MEL)))
