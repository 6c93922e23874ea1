"""What searches add to kvlab."""

from kvlab.own_extensions import Parts

PARTS = Parts(
    members={
        "search": {
            "searcher": ".searcher:Searcher",
            "remaining": ".pruner:count_remaining_suggestions",
            "space": ".summary:format_search_space",
            "summary": ".summary:format_search",
            "confirmation": ".summary:write_confirmation",
            "tables": ".tables",
        },
        "search_sections": {
            "answer": ".section:report_search_answer",
            "best": ".section:report_best_trials",
            "next": ".section:report_next_sweep",
            "front": ".section:report_search_front",
            "history": ".section:report_search_history",
            "importances": ".section:report_importances",
            "space": ".section:report_search_setup",
            "unmeasured": ".section:report_unmeasured",
            "trials": ".section:report_all_trials",
        },
    }
)
