from mmfsdp.saving.archives import write_archive as write_archive
from mmfsdp.saving.load import reference_of as reference_of
from mmfsdp.saving.reading import open_shared as open_shared
from mmfsdp.saving.reading import read_checkpoint as read_checkpoint
from mmfsdp.saving.reading import read_verified as read_verified
from mmfsdp.saving.reading import read_whole as read_whole
from mmfsdp.saving.save import write_checkpoint as write_checkpoint
