"""The networks of the paper's appendix "Network architectures", and two transformers."""

from cprop_lab.models.awd_lstm import AWDLSTM, Dropouts, Output, regularisation
from cprop_lab.models.convolutional import convolutional, vgg11, vgg16
from cprop_lab.models.fully_connected import fully_connected
from cprop_lab.models.resnet import resnet18, resnet50
from cprop_lab.models.transformer import GPT, WordTransformer

__all__ = [
    "AWDLSTM",
    "GPT",
    "Dropouts",
    "Output",
    "WordTransformer",
    "convolutional",
    "fully_connected",
    "regularisation",
    "resnet18",
    "resnet50",
    "vgg11",
    "vgg16",
]
