"""The style sheet of the HTML report. System fonts and colours that hold in a light and a dark window."""

STYLE = """
:root { --ink: #1d2430; --soft: #5b6573; --line: #dfe3e8; --page: #f5f6f8; --card: #fff; --good: #1c7c4f;
  --bad: #b3261e;
  --device: #3b6fb6; --storage: #2a9d72; --computed: #c3cad4; --ideal: #8a6fc9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa4b2; --line: #323a46; --page: #14181e;
  --card: #1c222b; --good: #4cc38a; --bad: #ff7a70; --device: #5a90da; --storage: #3dbb8c; --computed: #465160;
  --ideal: #a58be0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 24px 16px 48px; }
header { display: flex; flex-wrap: wrap; gap: 12px 24px; align-items: center; justify-content: space-between; }
h1 { margin: 0; font-size: 24px; } h2 { margin: 0 0 8px; font-size: 17px; } h3 { margin: 12px 0 4px; font-size: 15px; }
p { margin: 0 0 12px; color: var(--soft); overflow-wrap: anywhere; } header p { margin: 2px 0 0; }
.verdict { padding: 6px 14px; border-radius: 8px; border: 2px solid; font-size: 16px; }
.verdict.good { color: var(--good); } .verdict.bad { color: var(--bad); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px;
  margin-top: 16px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; background: none;
  border: 0; padding: 0; }
.cards div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px; }
.cards b { display: block; font-size: 25px; line-height: 1.25; } .cards span, .cards small { display: block; }
.cards small { color: var(--soft); overflow-wrap: anywhere; } .cards .bad b { color: var(--bad); }
.row { display: grid; grid-template-columns: 92px 1fr; gap: 10px; align-items: center; margin: 6px 0; }
.row span { color: var(--soft); white-space: nowrap; }
.bar { display: flex; height: 22px; border-radius: 5px; overflow: hidden; background: var(--line); }
.bar i { display: block; height: 100%; flex: none; } .under { margin: -4px 0 8px 102px; font-size: 13px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 22px; list-style: none; margin: 10px 0 0; padding: 0;
  color: var(--soft); }
.legend i, td i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; }
.legend b { color: var(--ink); font-weight: 600; }
.device { background: var(--device); } .storage { background: var(--storage); }
  .computed { background: var(--computed); }
.ideal { background: var(--ideal); } .lost0 { background: #d9822b; } .lost1 { background: #c15b7c; }
.lost2 { background: #a0703c; } .lost3 { background: #7a7f8a; } .lost4 { background: #c9a227; }
  .lost5 { background: #6b8fa3; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(120px, 1fr)); gap: 10px 16px; }
.figures b { display: block; font-size: 19px; } .figures span { color: var(--soft); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; font-size: 13px; } th, td { text-align: right; padding: 5px 10px; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } tbody tr { border-top: 1px solid var(--line); }
ul { margin: 0 0 8px; padding-left: 20px; } li { overflow-wrap: anywhere; } summary { cursor: pointer;
  font-weight: 600; }
details td:last-child { overflow-wrap: anywhere; }
"""
