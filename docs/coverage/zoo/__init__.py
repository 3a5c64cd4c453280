"""The architectures of the table, by family."""

from docs.coverage.zoo.audio import AUDIO
from docs.coverage.zoo.decoders import DECODERS
from docs.coverage.zoo.encoder_decoders import ENCODER_DECODERS
from docs.coverage.zoo.multimodal import MULTIMODAL
from docs.coverage.zoo.text_encoders import TEXT_ENCODERS
from docs.coverage.zoo.vision import VISION

ARCHITECTURES = (*TEXT_ENCODERS, *ENCODER_DECODERS, *DECODERS, *VISION, *AUDIO, *MULTIMODAL)
