// Evaluate says what GitOps controllers make of an object: Argo CD's Lua sandbox, Flux's health expressions and kstatus.
//
// It reads a JSON list of questions from standard input and writes a list of answers, one each. Flux is asked through its own
// packages. Argo CD's package of this drags its whole API along, so its sandbox is rebuilt here as its documentation describes it: gopher-lua
// with nothing open but base, table, package and an os with date and time; one second; the object in the global obj.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"github.com/fluxcd/pkg/apis/kustomize"
	"github.com/fluxcd/pkg/runtime/cel"
	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	luajson "layeh.com/gopher-json"
)

const luaTime = time.Second

type question struct {
	Ask         string                            `json:"ask"` // argo, flux or kstatus
	Object      map[string]any                    `json:"object"`
	Script      string                            `json:"script,omitempty"`      // argo
	Expressions *kustomize.HealthCheckExpressions `json:"expressions,omitempty"` // flux
}

type answer struct {
	Value   any    `json:"value,omitempty"`   // argo: what the script returned
	Status  string `json:"status,omitempty"`  // flux, kstatus
	Message string `json:"message,omitempty"` // kstatus
	Error   string `json:"error,omitempty"`
}

func main() {
	var questions []question
	if err := json.NewDecoder(os.Stdin).Decode(&questions); err != nil {
		fmt.Fprintln(os.Stderr, "standard input is no list of questions:", err)
		os.Exit(2)
	}
	answers := make([]answer, len(questions))
	for i, q := range questions {
		got, err := q.answer()
		if err != nil {
			got.Error = err.Error()
		}
		answers[i] = got
	}
	if err := json.NewEncoder(os.Stdout).Encode(answers); err != nil {
		os.Exit(1)
	}
}

func (q question) answer() (answer, error) {
	object, err := typed(q.Object)
	if err != nil {
		return answer{}, err
	}
	switch q.Ask {
	case "argo":
		value, err := runLua(object.Object, q.Script)
		return answer{Value: value}, err
	case "kstatus":
		result, err := status.Compute(object)
		if err != nil {
			return answer{}, err
		}
		return answer{Status: result.Status.String(), Message: result.Message}, nil
	case "flux":
		if q.Expressions == nil {
			return answer{}, errors.New("expressions are missing")
		}
		evaluator, err := cel.NewStatusEvaluator(q.Expressions)
		if err != nil {
			return answer{}, err
		}
		result, err := evaluator.Evaluate(context.Background(), object)
		if err != nil {
			return answer{}, err
		}
		return answer{Status: result.Status.String()}, nil
	}
	return answer{}, fmt.Errorf("ask is %q; it must be argo, flux or kstatus", q.Ask)
}

// typed has whole numbers as int64, as a Kubernetes client does; encoding/json makes all of them float64.
func typed(object map[string]any) (*unstructured.Unstructured, error) {
	text, err := json.Marshal(object)
	if err != nil {
		return nil, err
	}
	made := &unstructured.Unstructured{}
	return made, made.UnmarshalJSON(text)
}

func runLua(object map[string]any, script string) (any, error) {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	for name, open := range map[string]lua.LGFunction{
		lua.LoadLibName: lua.OpenPackage, lua.BaseLibName: lua.OpenBase, lua.TabLibName: lua.OpenTable,
	} {
		call := lua.P{Fn: state.NewFunction(open), NRet: 0, Protect: true}
		if err := state.CallByParam(call, lua.LString(name)); err != nil {
			return nil, err
		}
	}
	if err := onlyTime(state); err != nil {
		return nil, err
	}
	limit, cancel := context.WithTimeout(context.Background(), luaTime)
	defer cancel()
	state.SetContext(limit)
	state.SetGlobal("obj", toLua(state, object))
	if err := state.DoString(script); err != nil {
		return nil, err
	}
	returned := state.Get(-1)
	if returned.Type() != lua.LTTable {
		return nil, fmt.Errorf("the script returned %s; Argo CD expects a table", returned.Type())
	}
	text, err := luajson.Encode(returned)
	if err != nil {
		return nil, err
	}
	var value any
	err = json.Unmarshal(text, &value)
	return value, err
}

// onlyTime opens the module os and leaves date and time of it, as a global and for require.
func onlyTime(state *lua.LState) error {
	open := lua.P{Fn: state.NewFunction(lua.OpenOs), NRet: 1, Protect: true}
	if err := state.CallByParam(open, lua.LString(lua.OsLibName)); err != nil {
		return err
	}
	whole := state.Get(-1).(*lua.LTable)
	state.Pop(1)
	safe := state.NewTable()
	for _, name := range []string{"date", "time"} {
		safe.RawSetString(name, whole.RawGetString(name))
	}
	state.SetGlobal(lua.OsLibName, safe)
	loaded := state.GetField(state.GetField(state.Get(lua.EnvironIndex), "package"), "loaded")
	state.SetField(loaded, lua.OsLibName, safe)
	return nil
}

func toLua(state *lua.LState, value any) lua.LValue {
	switch v := value.(type) {
	case bool:
		return lua.LBool(v)
	case string:
		return lua.LString(v)
	case int64:
		return lua.LNumber(v)
	case float64:
		return lua.LNumber(v)
	case []any:
		list := state.NewTable()
		for _, item := range v {
			list.Append(toLua(state, item))
		}
		return list
	case map[string]any:
		table := state.NewTable()
		for key, item := range v {
			table.RawSetString(key, toLua(state, item))
		}
		return table
	}
	return lua.LNil
}
