//! Tools in the form of OpenAI's Responses API: functions, and namespaces of functions. To the model a function of a namespace has the name
//! `namespace.function`.

use crate::serve::api::{
    chat::{
        AllowedMode, AllowedTools, Function, FunctionName, NamedFunction, NamedTool, Tool, ToolChoice,
        ToolMode,
    },
    responses::{
        NamespaceTool, ResponsesFunction, ResponsesNamedTool, ResponsesTool, ResponsesToolChoice,
        ResponsesToolName,
    },
};
use serde_json::{Value, json};

/// The name that the model sees.
pub(super) fn full_name(namespace: Option<&str>, name: &str) -> String {
    namespace.map_or_else(|| name.to_owned(), |namespace| format!("{namespace}.{name}"))
}

/// The functions that the model sees, each with its namespace and its place in the request.
pub(super) fn functions(
    tools: &[ResponsesTool],
) -> impl Iterator<Item = (Option<&str>, &ResponsesFunction, String)> {
    tools.iter().enumerate().flat_map(|(index, tool)| -> Vec<_> {
        match tool {
            ResponsesTool::Function(function) => vec![(None, function, format!("tools[{index}]"))],
            ResponsesTool::Namespace(namespace) => {
                let name = Some(namespace.name.as_str());
                let inner = namespace.tools.iter().enumerate();
                inner
                    .map(|(at, NamespaceTool::Function(function))| {
                        (name, function, format!("tools[{index}].tools[{at}]"))
                    })
                    .collect()
            }
            ResponsesTool::WebSearch {}
            | ResponsesTool::ImageGeneration {}
            | ResponsesTool::ToolSearch {} => Vec::new(),
        }
    })
}

/// The tools of a chat completion.
pub(super) fn shown(tools: &[ResponsesTool]) -> Vec<Tool> {
    let tool = |(namespace, function, _): (Option<&str>, &ResponsesFunction, String)| {
        let ResponsesFunction { name, description, parameters, strict, .. } = function.clone();
        let name = full_name(namespace, &name);
        Tool::Function { function: Function { name, description, parameters, strict } }
    };
    functions(tools).map(tool).collect()
}

/// The namespace and the name of a function by the name that the model sees.
pub(super) fn parts_of_name(tools: &[ResponsesTool], seen: &str) -> (Option<String>, String) {
    let called =
        functions(tools).find(|(namespace, function, _)| full_name(*namespace, &function.name) == seen);
    let (namespace, name) =
        called.map_or((None, seen), |(namespace, function, _)| (namespace, &function.name));
    (namespace.map(str::to_owned), name.to_owned())
}

/// The place in the request of a field of the tools of [`shown`]; other fields as they are.
pub(super) fn field_of_request(tools: &[ResponsesTool], field: &str) -> String {
    let parts = field.strip_prefix("tools[").and_then(|rest| rest.split_once(']'));
    let place = parts.and_then(|(index, rest)| {
        let (_, _, place) = functions(tools).nth(index.parse().ok()?)?;
        Some(format!("{place}{rest}"))
    });
    place.unwrap_or_else(|| field.to_owned())
}

/// The choice of a tool of a chat completion.
pub(super) fn choice(choice: &ResponsesToolChoice) -> ToolChoice {
    let named = |tool: &ResponsesToolName| {
        let ResponsesToolName::Function { name, namespace } = tool;
        FunctionName { name: full_name(namespace.as_deref(), name) }
    };
    match choice {
        ResponsesToolChoice::Mode(mode) => ToolChoice::Mode(*mode),
        ResponsesToolChoice::Named(ResponsesNamedTool::Function { name, namespace }) => {
            let function = FunctionName { name: full_name(namespace.as_deref(), name) };
            ToolChoice::Named(NamedTool::Function { function })
        }
        ResponsesToolChoice::Named(ResponsesNamedTool::AllowedTools { mode, tools }) => {
            let tools = tools.iter().map(|tool| NamedFunction::Function { function: named(tool) }).collect();
            ToolChoice::Named(NamedTool::AllowedTools { allowed_tools: AllowedTools { mode: *mode, tools } })
        }
    }
}

/// The choice of a tool as a response repeats it.
pub(super) fn given_choice(choice: Option<&ResponsesToolChoice>) -> Value {
    match choice {
        None | Some(ResponsesToolChoice::Mode(ToolMode::Auto)) => json!("auto"),
        Some(ResponsesToolChoice::Mode(ToolMode::None)) => json!("none"),
        Some(ResponsesToolChoice::Mode(ToolMode::Required)) => json!("required"),
        Some(ResponsesToolChoice::Named(ResponsesNamedTool::Function { name, namespace })) => {
            function_name(name, namespace.as_deref())
        }
        Some(ResponsesToolChoice::Named(ResponsesNamedTool::AllowedTools { mode, tools })) => {
            let mode = if *mode == AllowedMode::Auto { "auto" } else { "required" };
            let named = |ResponsesToolName::Function { name, namespace }: &ResponsesToolName| {
                function_name(name, namespace.as_deref())
            };
            json!({"type": "allowed_tools", "mode": mode, "tools": tools.iter().map(named).collect::<Vec<_>>()})
        }
    }
}

fn function_name(name: &str, namespace: Option<&str>) -> Value {
    let mut value = json!({"type": "function", "name": name});
    if let Some(namespace) = namespace {
        value["namespace"] = namespace.into();
    }
    value
}
