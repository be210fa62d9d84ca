"""Whatever a person looks at: texts, tables, pictures, pages, and views in notebooks.

The room is called ``display`` because ``meshwright.show`` is a function. It stands over the rooms
whose values it shows: those ask :mod:`meshwright.views`, which finds the function here.
"""

VIEWS = {  # kind of view -> class -> the function that draws it
    "text": {
        "equivalence.judging.Equivalence": "display.text.equivalence:equivalence_text",
        "layouts.explain.Explanation": "display.text.explanation:explanation_text",
        "planning.beside.Comparison": "display.text.beside:comparison_text",
        "planning.beside.Pair": "display.text.beside:pair_text",
        "planning.changes.Finding": "display.text.changes:finding_text",
        "planning.estimate.Estimate": "display.text.estimate:estimate_text",
        "planning.measurement.Measured": "display.text.beside:measured_text",
        "planning.report.DryRun": "display.text.dry_run:dry_run_text",
        "planning.search.plan.Plan": "display.text.plan:plan_text",
        "planning.throughput.Price": "display.text.estimate:price_text",
        "stages.table.TickTable": "display.text.ticks:tick_table_text",
    },
    "notebook": {
        "equivalence.judging.Equivalence": "display.notebook:equivalence_view",
        "layouts.explain.Explanation": "display.notebook:explanation_view",
        "layouts.layout.Layout": "display.notebook:layout_view",
        "layouts.layout_map.LayoutMap": "display.notebook:layout_map_view",
        "layouts.mesh.Mesh": "display.notebook:mesh_view",
        "planning.beside.Comparison": "display.notebook:comparison_view",
        "planning.beside.Pair": "display.notebook:pair_view",
        "planning.measurement.Measured": "display.notebook:measured_view",
        "planning.report.DryRun": "display.notebook:dry_run_view",
        "planning.search.plan.Plan": "display.notebook:plan_view",
        "stages.table.TickTable": "display.notebook:tick_table_view",
    },
    "page": {
        "planning.beside.Pair": "display.page.document:pair_page",
        "planning.report.DryRun": "display.page.document:dry_run_page",
        "planning.search.plan.Plan": "display.page.document:plan_page",
        "serving.http.openapi.Paths": "display.page.api:api_page",
        "serving.http.overview.Overview": "display.page.server:server_page",
    },
    "picture": {"stages.table.TickTable": "display.drawing.ticks:tick_table_svg"},
    "trace": {"planning.report.DryRun": "display.trace:trace_of"},
}
