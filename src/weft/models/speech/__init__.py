"""Networks for sound: bands of pitch in, classes out."""

from __future__ import annotations

from weft.models.speech.speech_encoder import SPEECH_MODELS, SpeechBlock, SpeechStem, build_speech_model

__all__ = ["SPEECH_MODELS", "SpeechBlock", "SpeechStem", "build_speech_model"]
