"""The paper's networks, as its appendix A lists them."""

from cprop_lab.models.awd_lstm import AWDLSTM, Dropouts
from cprop_lab.models.convolutional import convolutional, vgg11, vgg16
from cprop_lab.models.fully_connected import fully_connected
from cprop_lab.models.resnet import resnet18, resnet50

__all__ = ["AWDLSTM", "Dropouts", "convolutional", "fully_connected", "resnet18", "resnet50", "vgg11", "vgg16"]
