"""The architectures of the table, by family."""

from tests.zoo.entries.audio import AUDIO
from tests.zoo.entries.decoders import DECODERS
from tests.zoo.entries.encoder_decoders import ENCODER_DECODERS
from tests.zoo.entries.multimodal import MULTIMODAL
from tests.zoo.entries.text_encoders import TEXT_ENCODERS
from tests.zoo.entries.vision import VISION

ARCHITECTURES = (*TEXT_ENCODERS, *ENCODER_DECODERS, *DECODERS, *VISION, *AUDIO, *MULTIMODAL)
