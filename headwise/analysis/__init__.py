"""Analysis of heads: recording, metrics, ablation, roles, attribution, similarity. The model does not change."""

from typing import TYPE_CHECKING

from headwise.lazy_import import make_lazy_getattr

if TYPE_CHECKING:
    from headwise.analysis.ablation.ablate import ablated, patched
    from headwise.analysis.ablation.eval_targets import TargetBatch
    from headwise.analysis.ablation.importance import importance
    from headwise.analysis.ablation.joint_quantization_cost import joint_quantization_costs
    from headwise.analysis.ablation.quantization_sensitivity import sensitivity
    from headwise.analysis.ablation.recorded_head_outputs import eval_corpus
    from headwise.analysis.attribution.score_attribution import explain
    from headwise.analysis.finding.head_search import find_heads
    from headwise.analysis.finding.head_search_result import HeadSearchResult
    from headwise.analysis.metrics.metric import AttentionToPosition, AttentionToTokens, Metric, MetricSpec
    from headwise.analysis.metrics.statistics import MIN_UNITS, bootstrap_difference_interval
    from headwise.analysis.recording.attention_maps import attention_maps
    from headwise.analysis.recording.batching import forward_ids, tokenizer_of
    from headwise.analysis.recording.recording import record
    from headwise.analysis.recording.text_hash_split import REPORTING, SELECTION
    from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus, default_corpus
    from headwise.analysis.roles.best_relation_heads import best_relation_heads
    from headwise.analysis.roles.head_history import HeadHistory
    from headwise.analysis.roles.profile import profile
    from headwise.analysis.roles.profile_corpus_shards import profile_shards
    from headwise.analysis.roles.profile_cost_estimate import estimate_profile
    from headwise.analysis.roles.profile_result import Profile
    from headwise.analysis.roles.roles import RELATION_THRESHOLD, Role, score
    from headwise.analysis.similarity.compare_heads import compare_heads
    from headwise.analysis.similarity.match_heads import match_heads
    from headwise.analysis.similarity.weight_similarity import compare_weights, effective_rank, fold_norms_into_heads

__all__ = [
    "MIN_UNITS",
    "RELATION_THRESHOLD",
    "REPORTING",
    "SELECTION",
    "AttentionToPosition",
    "AttentionToTokens",
    "HeadHistory",
    "HeadSearchResult",
    "Metric",
    "MetricSpec",
    "Profile",
    "Role",
    "TargetBatch",
    "TokenizedCorpus",
    "ablated",
    "attention_maps",
    "best_relation_heads",
    "bootstrap_difference_interval",
    "compare_heads",
    "compare_weights",
    "default_corpus",
    "effective_rank",
    "estimate_profile",
    "eval_corpus",
    "explain",
    "find_heads",
    "fold_norms_into_heads",
    "forward_ids",
    "importance",
    "joint_quantization_costs",
    "match_heads",
    "patched",
    "profile",
    "profile_shards",
    "record",
    "score",
    "sensitivity",
    "tokenizer_of",
]

__getattr__ = make_lazy_getattr(
    __name__,
    {
        "ablation.ablate": ["ablated", "patched"],
        "ablation.eval_targets": ["TargetBatch"],
        "ablation.recorded_head_outputs": ["eval_corpus"],
        "ablation.importance": ["importance"],
        "ablation.joint_quantization_cost": ["joint_quantization_costs"],
        "ablation.quantization_sensitivity": ["sensitivity"],
        "attribution.score_attribution": ["explain"],
        "finding.head_search": ["find_heads"],
        "finding.head_search_result": ["HeadSearchResult"],
        "metrics.metric": ["AttentionToPosition", "AttentionToTokens", "Metric", "MetricSpec"],
        "metrics.statistics": ["MIN_UNITS", "bootstrap_difference_interval"],
        "recording.attention_maps": ["attention_maps"],
        "recording.batching": ["forward_ids", "tokenizer_of"],
        "recording.recording": ["record"],
        "recording.text_hash_split": ["REPORTING", "SELECTION"],
        "recording.tokenized_corpus": ["TokenizedCorpus", "default_corpus"],
        "roles.best_relation_heads": ["best_relation_heads"],
        "roles.head_history": ["HeadHistory"],
        "roles.profile": ["profile"],
        "roles.profile_result": ["Profile"],
        "roles.roles": ["RELATION_THRESHOLD", "Role", "score"],
        "roles.profile_cost_estimate": ["estimate_profile"],
        "roles.profile_corpus_shards": ["profile_shards"],
        "similarity.compare_heads": ["compare_heads"],
        "similarity.match_heads": ["match_heads"],
        "similarity.weight_similarity": ["compare_weights", "effective_rank", "fold_norms_into_heads"],
    },
)
