from mmfsdp.frontends.config_readers import ReadConfig as ReadConfig
from mmfsdp.frontends.config_readers import read_config as read_config
from mmfsdp.frontends.findings import LEVELS as LEVELS
from mmfsdp.frontends.findings import Diagnosis as Diagnosis
from mmfsdp.frontends.findings import Finding as Finding
from mmfsdp.frontends.findings import Level as Level
from mmfsdp.frontends.model_building import build_model as build_model
from mmfsdp.frontends.training_step import TrainingStep as TrainingStep
