from mmfsdp.config import ShardConfig as ShardConfig
from mmfsdp.optimizers.building import build_optimizer as build_optimizer
from mmfsdp.optimizers.building import matrix_optimizer as matrix_optimizer
from mmfsdp.parity.comparing import compare as compare
from mmfsdp.parity.proving import prove as prove
from mmfsdp.parity.recorder import recording as recording
from mmfsdp.planning import ShardPlan as ShardPlan
from mmfsdp.planning import plan as plan
from mmfsdp.rehearsal import fit as fit
from mmfsdp.rehearsal import rehearse as rehearse
from mmfsdp.runtime.grad_scaler import GradScaler as GradScaler
from mmfsdp.runtime.sharded_params import sharded_params as sharded_params
from mmfsdp.runtime.training import clip_grad_norm_ as clip_grad_norm_
from mmfsdp.runtime.training import no_sync as no_sync
from mmfsdp.runtime.whole_params import full_params as full_params
from mmfsdp.saving.load import load_checkpoint as load_checkpoint
from mmfsdp.saving.pretrained import load_pretrained as load_pretrained
from mmfsdp.saving.save import save_checkpoint as save_checkpoint
from mmfsdp.sharding.apply import apply_plan as apply_plan
from mmfsdp.sharding.apply import shard as shard
from mmfsdp.sharding.meta import parameters_on_meta as parameters_on_meta
from mmfsdp.state.model import load_model_state_dict as load_model_state_dict
from mmfsdp.state.model import model_state_dict as model_state_dict
from mmfsdp.state.optimizer import load_optim_state_dict as load_optim_state_dict
from mmfsdp.state.optimizer import optim_state_dict as optim_state_dict
from mmfsdp.torch_style.wrapper import FullyShardedDataParallel as FullyShardedDataParallel

__version__: str
