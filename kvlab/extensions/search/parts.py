"""What searches add to kvlab."""

from kvlab.own_extensions import Parts

_FOLDER = "kvlab.extensions.search"
_SECTIONS = {
    "answer": "report_search_answer",
    "best": "report_best_trials",
    "next": "report_next_sweep",
    "front": "report_search_front",
    "history": "report_search_history",
    "importances": "report_importances",
    "space": "report_search_setup",
    "unmeasured": "report_unmeasured",
    "trials": "report_all_trials",
}

PARTS = Parts(
    members={
        "search": {
            "searcher": f"{_FOLDER}.searcher:Searcher",
            "remaining": f"{_FOLDER}.history:count_remaining_suggestions",
            "space": f"{_FOLDER}.summary:format_search_space",
            "summary": f"{_FOLDER}.summary:format_search",
            "confirmation": f"{_FOLDER}.summary:write_confirmation",
            "tables": f"{_FOLDER}.tables",
        },
        "search_sections": {name: f"{_FOLDER}.section:{make}" for name, make in _SECTIONS.items()},
    },
)
