from mmfsdp.torch_style.arguments import ARGUMENTS as ARGUMENTS
from mmfsdp.torch_style.arguments import Translated as Translated
from mmfsdp.torch_style.arguments import advice_for_argument as advice_for_argument
from mmfsdp.torch_style.arguments import translate_arguments as translate_arguments
