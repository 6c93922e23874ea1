"""What a file of ``extensions:`` imports. See docs/extend.md."""

from kvlab.spec.extension_files import Extension as Extension
from kvlab.spec.kv_forms import KVForm as KVForm
from kvlab.spec.kv_forms import StoredVectors as StoredVectors
from kvlab.spec.mixers import Mixer as Mixer
from kvlab.spec.source_options import DocumentSource as DocumentSource
from kvlab.spec.source_options import SourceOptions as SourceOptions
from kvlab.spec.spec_model import SpecModel as SpecModel
from kvlab.spec.token_metrics import TokenMetric as TokenMetric
