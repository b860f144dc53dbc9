_base_ = "mmpretrain::deit/deit-small_4xb256_in1k.py"
custom_imports = dict(imports=["mmfsdp_mmengine"], allow_failed_imports=False)
runner_type = "FlexibleRunner"
strategy = dict(type="FSDPStrategy", model_wrapper=dict(auto_wrap_policy="auto"))
